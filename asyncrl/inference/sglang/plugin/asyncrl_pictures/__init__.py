"""Reads pictures in within SGLang's process, in the place of SGLang's own processors.

`asyncrl.inference.sglang.host` puts the folder around this package on the server's PYTHONPATH and names the package
in SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE. It is imported by SGLang's Python, which need not have asyncrl installed, so it
imports nothing of asyncrl. SGLang skips modules of the package that cannot be imported; this import makes it fail.
"""

from . import processor as processor
