from poison import poison_fresh_memory

poison_fresh_memory()


def pytest_addoption(parser):
    parser.addoption(
        "--at-full-size", action="store_true", help="tests of minutes that stand in for a large GPU"
    )
