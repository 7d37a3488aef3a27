"""Communication between the processes of a run: name resolution, push-pull, request-reply, security."""
