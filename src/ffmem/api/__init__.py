"""The public functions of ffmem; `import ffmem` gives all of them.

Each command of the command line calls one. Heavy libraries are imported when a function needs
them, so that reading an index never loads torch.
"""
