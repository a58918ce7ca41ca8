"""The tiny vision model: drawn images, questions about them, and the program that trains the model."""
