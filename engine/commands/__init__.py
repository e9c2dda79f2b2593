"""The commands of the command line: each module has a `register(app)` that adds its command."""

from tidekv.engine.commands import bench, explain, replay, run, sides, timeline, simulate, timeline

COMMANDS = (run.register, sides.register, bench.register, replay.register, explain.register, timeline.register, simulate.register, timeline.register)
