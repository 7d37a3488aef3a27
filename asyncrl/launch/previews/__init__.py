"""Options of the command line that print what would run, and start nothing."""
