"""The functions of megablocks 0.10's `ops`, by its names, arguments and results, on any device."""
