"""How the processes of a run find and talk to each other: name resolution, push-pull, request-reply, security."""
