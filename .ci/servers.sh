# What the scripts for tests with real servers of an engine have in common; they source it. They set
#   engine    the word of dev.py's command, of its environment and of its tests
#   title     the engine's name
#   gb        GB of disk and of memory that it needs
#   plain     options of `dev.py $engine` that start one plain server
#   short     the tests of the short form
#
#   .ci/ENGINE                  all tests
#   .ci/ENGINE short SECONDS    some, for .ci/run
#
# The short form is red only if its tests fail. If this machine cannot run the engine (no registry, no room, a plain
# server that does not serve) or SECONDS do not suffice, a line says so, and it is green.
#
# TIDEKV_TEST_ENGINE_VENV, with the engine in capitals, names an environment that is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
servers=tests/integrations/test_${engine}_server.py

run_tests() {
    python3 dev.py test -rs --durations=5 "$@"
}

# Make the environment, or take the one that is named, and export where it is.
environment() {
    local python
    python=$(python3 -m "benchmarks.${engine}_pair.environment" | tail -1) || return
    export "TIDEKV_TEST_${engine^^}_VENV=$(dirname "$(dirname "$python")")"
}

skip() {
    echo "ci: the tests that start $title servers are skipped: $1"
    exit 0
}

# has_room KB
has_room() {
    [ "$1" -ge $((gb * 1000000)) ]
}

within_limit() {
    has_room "$(df --output=avail -k . | tail -1)" || skip "the disk has less than $gb GB of room"
    has_room "$(awk '/^MemAvailable/ {print $2}' /proc/meminfo)" || skip "less than $gb GB of memory are available"
    environment || skip "an environment with $title could not be made"
    python3 dev.py "$engine" $plain || skip "a plain $title does not serve here"
    run_tests $(printf "$servers::%s " $short)
}

run() {
    case "${1-}" in
    short)
        # The limit is on a process of its own, since what is started here must end with it.
        timeout "$2" "$0" within-limit || {
            code=$?
            [ "$code" = 124 ] || exit "$code"
            skip "they did not end within $2 s"
        }
        ;;
    within-limit) within_limit ;;
    *)
        environment
        run_tests "$servers" "tests/benchmarks/test_${engine}_pair.py" "$@"
        ;;
    esac
}
