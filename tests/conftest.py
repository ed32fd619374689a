import signal

from poison import poison_fresh_memory

poison_fresh_memory()
# A shell lets what it starts in the background ignore SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--at-full-size", action="store_true", help="tests of minutes that stand in for a large GPU"
    )
