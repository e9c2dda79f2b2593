"""The commands of the command line: each module has a `register(app)` that adds its command."""

from tidekv.engine.commands import bench, replay, run

COMMANDS = (run.register, bench.register, replay.register)
