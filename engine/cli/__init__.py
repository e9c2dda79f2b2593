"""Commands of the command line. Each module has a `register(app)` that adds its command."""

from tidekv.engine.cli import checkout, config, doctor, explain, replay, store, timeline, top

COMMANDS = (
    checkout.register,
    replay.register,
    explain.register,
    timeline.register,
    store.register,
    top.register,
    config.register,
    doctor.register,
)
