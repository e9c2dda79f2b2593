"""What a journal shows of each request: its story, in words and as pictures."""
