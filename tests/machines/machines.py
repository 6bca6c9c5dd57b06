"""Two machines on this one: network namespaces with a router between them, each with its name, hosts file and disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NAMES = ("first-host", "second-host")
ADDRESSES = ("10.77.0.2", "10.77.1.2")
NETWORK = "10.77.0.0/16"

# $0 is the machine's name, then its hosts file, its disk, the place of both, and the command. No server for names is
# asked, because a firewall would drop the question.
ENTER = (
    'hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind /dev/null /etc/resolv.conf'
    ' && mount --bind "$2" "$3" && cd "$3" && shift 3 && exec "$@"'
)


def call(*words):
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


class Machines:
    """Two machines, which end with the context.

    Args:
        root: directory for their disks.
        shares_disk: whether both have the same files at `disk`.

    Raises:
        CalledProcessError: this process may not make namespaces.
    """

    def __init__(self, root, *, shares_disk=True):
        self.disk, self._hosts = root / "disk", root / "hosts"
        self.disks = [root / ("disk-0" if shares_disk else f"disk-{number}") for number in range(2)]
        for path in (self.disk, *self.disks):
            path.mkdir(exist_ok=True)
        lines = [f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._spaces = [f"shardwise-{os.getpid()}-{part}" for part in ("0", "1", "router")]
        self._started = []

    def __enter__(self):
        try:
            self._build()
        except (OSError, subprocess.CalledProcessError):
            self._end()
            raise
        return self

    def _build(self):
        *machines, router = self._spaces
        for name in self._spaces:
            call("ip", "netns", "add", name)
        for number, name in enumerate(machines):
            link = f"r{number}"
            call("ip", "link", "add", "net", "netns", name, "type", "veth", "peer", link, "netns", router)
            for space, device, host in ((name, "net", 2), (router, link, 1)):
                call("ip", "-n", space, "address", "add", f"10.77.{number}.{host}/24", "dev", device)
                call("ip", "-n", space, "link", "set", device, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", name, "route", "add", "default", "via", f"10.77.{number}.1")
            # The kernel gives up a connection after half a minute without an answer, not after a quarter of an hour.
            call("ip", "netns", "exec", name, "sysctl", "-w", "net.ipv4.tcp_retries2=6")
        call("ip", "netns", "exec", router, "sysctl", "-w", "net.ipv4.ip_forward=1")
        call("ip", "netns", "exec", machines[0], *self._enter(0), "true")

    def __exit__(self, *error):
        self._end()

    def _end(self):
        for number in range(2):
            self.kill(number)
        for process, _ in self._started:
            process.wait()
        for name in self._spaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _enter(self, number):
        places = (self._hosts, self.disks[number], self.disk)
        return ["unshare", "--uts", "--mount", "sh", "-c", ENTER, NAMES[number], *map(str, places)]

    def start(self, number, *words, **environment):
        """Starts a Python module on a machine."""
        command = ["ip", "netns", "exec", self._spaces[number], *self._enter(number), sys.executable, "-m", *words]
        own = {"HF_HOME": str(self.disk / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log = self._hosts.with_name(f"log-{len(self._started)}")
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **own, **environment})
        self._started.append((process, log))
        return Running(process, log)

    def kill(self, number):
        """Ends every process of a machine by SIGKILL."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._spaces[number]], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def filter(self, action, *ports):
        """Between the machines, lets packets from and to `ports` pass, and others end as in a route of type `action`:
        `blackhole` drops them, `prohibit` answers that they may not pass.
        """
        rule = ("ip", "-n", self._spaces[2], "rule", "add")
        for port in ports:
            for end in ("sport", "dport"):
                call(*rule, "preference", 10, "ipproto", "tcp", end, port, "lookup", "main")
        call(*rule, "preference", 20, "from", NETWORK, action)

    def slow_down(self, *queue):
        """Sends all packets through `queue`, in words of `tc`."""
        for link in ("r0", "r1"):
            call("tc", "-n", self._spaces[2], "qdisc", "replace", "dev", link, "root", *queue)


class Running:
    """A command on a machine; its log is what it prints."""

    def __init__(self, process, log: Path):
        self._process, self._log = process, log

    @property
    def text(self):
        return self._log.read_text()

    def end(self, *, seconds):
        """Waits until the command ends; returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs on after {seconds} seconds:\n{self.text}") from None

    def await_text(self, pattern, *, seconds=90.0):
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text, re.DOTALL):
            assert self._process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.05)
