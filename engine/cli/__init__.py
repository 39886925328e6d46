"""The command line. `train` is the default command; each other command is one file."""
