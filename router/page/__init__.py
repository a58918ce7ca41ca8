"""The page at /: the cluster as a picture, its figures, recent requests and a chat. Static files and their routes."""
