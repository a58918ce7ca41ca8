"""Tool calls and reasoning as models write them: their formats, a grammar that forces calls, and parsers of answers."""
