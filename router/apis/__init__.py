"""APIs that are translated into OpenAI's chats and completions: requests on the way in, answers on the way out."""
