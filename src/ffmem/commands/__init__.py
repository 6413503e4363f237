"""The subcommands of `ffmem`: each reads its arguments, calls one function, prints."""
