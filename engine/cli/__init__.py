"""The commands of the command line: each module has a `register(app)` that adds its command."""

from benchmarks import __main__
from tidekv.engine.cli import config
from tidekv.engine.cli import doctor
from tidekv.engine.cli import explain
from tidekv.engine.cli import replay
from tidekv.engine.cli import run
from tidekv.engine.cli import sides
from tidekv.engine.cli import simulate
from tidekv.engine.cli import store
from tidekv.engine.cli import timeline
from tidekv.engine.cli import top

COMMANDS = (
    run.register,
    sides.register,
    __main__.register,
    replay.register,
    explain.register,
    simulate.register,
    timeline.register,
    store.register,
    top.register,
    config.register,
    doctor.register,
)
