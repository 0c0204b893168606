"""One way to write what a file may write in several: a pass each."""
