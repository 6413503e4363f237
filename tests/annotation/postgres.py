"""A PostgreSQL server of the tests' own: made in a new folder, stopped at the end.

It listens on a socket in that folder only, and runs as the user `postgres` where root tests.
"""

import os
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path

import psycopg


def programs():
    """Return the folder of initdb and pg_ctl, None where there is none."""
    places = [Path(place) for place in os.get_exec_path()]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if (place / "initdb").exists() and (place / "pg_ctl").exists():
            return place
    return None


class Server:
    """A running server; `url()` is that of a new, empty database."""

    def __init__(self):
        self.bin = programs()
        # The path of a socket has 107 bytes at most: pytest's own folders are too deep.
        self.folder = Path(tempfile.mkdtemp(prefix="ffmem-pg-", dir="/tmp"))
        self.numbers = count(1)
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
        data = str(self.folder / "data")
        self.run("initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8")
        self.start()

    def start(self):
        settings = f"-k {self.folder} -c listen_addresses= -c fsync=off -c max_connections=60"
        log = str(self.folder / "log")
        self.pg_ctl("-w", "-l", log, "-o", settings, "start")

    def stop(self, how="fast"):
        self.pg_ctl("-w", "-m", how, "stop")

    def remove(self):
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, template=None):
        """Return the URL of a new database: an empty one, or a copy of that at another URL."""
        name = f"study_{next(self.numbers)}"
        copied = _name(template) if template else "template0"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {copied}")
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def drop(self, url):
        """Remove a database; dozens of them would take long to remove at the end."""
        self.execute(f"DROP DATABASE {_name(url)} WITH (FORCE)")

    def execute(self, statement):
        where = {"host": str(self.folder), "user": "postgres", "dbname": "postgres"}
        with psycopg.connect(**where, autocommit=True) as connection:
            connection.execute(statement)

    def pg_ctl(self, *arguments):
        self.run("pg_ctl", "-D", str(self.folder / "data"), *arguments)

    def run(self, program, *arguments):
        command = [str(self.bin / program), *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        # pg_ctl leaves the server behind, which would keep a pipe open for ever.
        with (self.folder / "out").open("a+") as out:
            done = subprocess.run(command, cwd=self.folder, stdout=out, stderr=out, check=False)
            out.seek(0)
            assert done.returncode == 0, out.read()


def _name(url):
    """Return the name of the database at a URL."""
    return url.partition("@/")[2].partition("?")[0]
