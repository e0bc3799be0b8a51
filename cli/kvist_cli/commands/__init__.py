"""One module a command; each has `register(app)`."""
