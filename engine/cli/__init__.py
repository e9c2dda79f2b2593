"""Commands of the command line. Each module has a `register(app)` that adds its command."""

from tidekv.engine.cli import config, doctor, explain, replay, run, sides, simulate, store, timeline, top

COMMANDS = (
    run.register,
    sides.register,
    replay.register,
    explain.register,
    simulate.register,
    timeline.register,
    store.register,
    top.register,
    config.register,
    doctor.register,
)
