"""Traces of requests from a journal or a running engine, as text, pictures and spans."""
