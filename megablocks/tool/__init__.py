"""`python -m megablocks COMMAND`: answers about a machine, a model before it is trained, and files."""
