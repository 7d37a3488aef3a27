"""The command line: `python -m asyncrl.launch`, or `asyncrl`; the same from Python, in `notebook`.

`commands/` has a module or folder per command, `before_start/` the checks of a start, `previews/` what is printed
without starting anything; `train` starts a run.
"""
