"""What a new user does, on new Debian systems that have only what the README names: `make fresh`.

debootstrap makes each system, and apt-get installs the packages of the README there. A user then
takes a tarball of the last commit, without git, and root takes a clone. Both run the README's
commands to their end, and install and uninstall what pip can. It needs root, debootstrap, 15 GB of
disk and, on two cores, an hour for each system.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PACKAGES = re.search(r"^sudo apt-get install (.*)$", README, re.MULTILINE)[1]
COMMANDS = re.search(r"^```sh\n(make .*?)^```$", README, re.MULTILINE | re.DOTALL)[1].splitlines()
SYSTEMS = ("bookworm", "trixie", "sid")
USERS = {"user": "1000:1000", "root": "0:0"}
HOMES = {"user": "/home/user", "root": "/root"}
# How pip reaches its index, where that takes more than a network.
HANDED_ON = ("PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy")

USE = """(cd / && "$OLDPWD/.venv/bin/python" -W error -c '
import lltm_ops, torch
assert "site-packages" in lltm_ops.__file__, lltm_ops.__file__
lltm_ops.LLTM(3, 4)(torch.randn(5, 2, 3))[0].sum().backward()
print("works")')"""
PIP = ".venv/bin/python -m pip"
UNINSTALL = f'{PIP} uninstall --yes lltm_ops && test -z "$({PIP} list | grep lltm)"'
# In the environment that the README's commands have made.
INSTALLS = {
    "pip install": f"{PIP} install --no-build-isolation . && {USE} && {UNINSTALL}",
    "pip install of the sdist": (
        ".venv/bin/python setup.py --quiet sdist && "
        f"{PIP} install --no-build-isolation dist/*.tar.gz && {USE} && {UNINSTALL}"
    ),
}


def run_inside(system: Path, user: str, folder: str, command: str, log: Path) -> tuple[int, str]:
    """Its exit status and what it printed.

    No process and no mount outlives the command, or this script.
    """
    variables = {"HOME": HOMES[user], "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    variables |= {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    for value in variables.values():
        if os.path.isfile(value):
            (system / value[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(value, system / value[1:])
    mounts = f"mount -t proc proc {system}/proc && mount -t sysfs sysfs {system}/sys && "
    mounts += f"mount --rbind /dev {system}/dev"
    inside = ["chroot", f"--userspec={USERS[user]}", str(system), "env", "-i"]
    inside += [f"{name}={value}" for name, value in variables.items()]
    inside += ["bash", "-c", f"cd {folder} && {command}"]
    isolated = ["setpriv", "--pdeathsig=KILL"]
    isolated += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c"]
    with log.open("a+", errors="replace") as file:
        print(f"\n$ {command}", file=file, flush=True)
        begin, start = file.tell(), time.monotonic()
        whole = [*isolated, f'{mounts} && exec "$@"', "bash", *inside]
        status = subprocess.call(whole, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        words = f"exit status {status}, {time.monotonic() - start:.0f} s"
        file.seek(begin)
        passed = re.findall(r"\d+ passed[^=\n]*", file.read())
    return status, ", ".join([words, *passed[-1:]])


def make_system(name: str, folder: Path, log: Path) -> None:
    with log.open("ab") as file:
        command = ["debootstrap", "--variant=minbase", name, str(folder)]
        subprocess.run(command, check=True, stdout=file, stderr=file)
    shutil.copy("/etc/resolv.conf", folder / "etc" / "resolv.conf")
    # A mirror of sid may be older than its Release file allows.
    command = (
        f"apt-get -o Acquire::Check-Valid-Until=false update && apt-get install --yes {PACKAGES}"
    )
    status, _ = run_inside(folder, "root", "/", f"DEBIAN_FRONTEND=noninteractive; {command}", log)
    if status != 0:
        sys.exit(f"apt-get failed in {name}: {log} has what it said")
    versions = "useradd --create-home --uid 1000 user; python3 --version; g++ --version | head -1"
    run_inside(folder, "root", "/", versions, log)


def take_checkout(system: Path, user: str) -> str:
    """root's is a clone, the user's a tarball, without git."""
    place = f"{HOMES[user]}/lltm_ops"
    target = system / place[1:]
    if user == "root":
        subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, target], check=True)
    else:
        target.mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", target], input=archive.stdout, check=True)
        subprocess.run(["chown", "-R", USERS[user], target], check=True)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help="of Debian")
    options = parser.parse_args()
    failed = False
    for name in options.systems:
        system = ROOT / "build" / "fresh" / name
        log = system.with_suffix(".log")
        shutil.rmtree(system, ignore_errors=True)
        system.mkdir(parents=True)
        log.write_bytes(b"")
        make_system(name, system, log)
        for user in USERS:
            folder = take_checkout(system, user)
            for title, command in {**{c: c for c in COMMANDS}, **INSTALLS}.items():
                status, words = run_inside(system, user, folder, command, log)
                failed |= status != 0
                print(f"{name}, {user}: {title}: {words}", flush=True)
            shutil.rmtree(system / folder[1:])
        shutil.rmtree(system)
    sys.exit(failed)


if __name__ == "__main__":
    main()
