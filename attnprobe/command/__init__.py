"""What stands around the command: options, kinds of pictures, targets, exits, printing."""
