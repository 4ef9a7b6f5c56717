"""`python -m attnprobe` is `attnprobe`."""

from attnprobe.cli import main

main()
