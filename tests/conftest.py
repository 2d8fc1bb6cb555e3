"""What all tests start from."""

import signal

# In the background of a script SIGINT is ignored, by the commands that tests start and interrupt
# too; like this they get the signal as they do in a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
