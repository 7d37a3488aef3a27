"""The command line: `python -m asyncrl.launch`, or `asyncrl`; the same from Python, in `notebook`.

`commands/` has a module or folder per command, `before_start/` the checks of a start; `help`, `previews` and
`show_allocation` have the options that print something without starting a process. `train` starts a run.
"""
