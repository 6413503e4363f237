"""A small real server that speaks chat completions, answers by a rule, and fails on demand."""

import json
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def lasts(text):
    """Return the marked last tokens of a question's texts, by number."""
    found = re.findall(r"^(\d+)\. .*«(.*)»$", text, re.MULTILINE)
    return {int(number): token.strip() for number, token in found}


def by_last_token(text):
    """Answer as somebody who sees last tokens only, and sees them all."""
    tokens = lasts(text)
    if "A pattern was described" in text:
        word = re.search(r"in other texts: ends with (\S+)", text)[1]
        return {"shows": [number for number, token in tokens.items() if token == word]}
    return {
        "patterns": [
            {
                "description": f"ends with {word}",
                "kind": "shallow",
                "triggers": [number for number, token in tokens.items() if token == word],
            }
            for word, n in Counter(tokens.values()).most_common(8)
        ]
    }


class Fault:
    """What a server does instead of answering well."""

    def __init__(self, status=200, body=None, seconds=0.0, content=None, finish="stop", **message):
        self.status, self.body, self.seconds = status, body, seconds
        self.content, self.finish, self.message = content, finish, message


def completion(content, finish="stop", **message):
    told = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "finish_reason": finish, "message": told}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@contextmanager
def serving(answer=by_last_token, faults=(), port=0):
    """Give the address of a server that fails as told, one request each, and then answers.

    `server.asked` holds every request's JSON.
    """
    waiting = list(faults)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append(asked)
            self.server.keys.append(self.headers["Authorization"])
            fault = waiting.pop(0) if waiting else None
            if fault is None:
                content = json.dumps(answer(asked["messages"][1]["content"]))
                self.reply(200, json.dumps(completion(content)))
                return
            time.sleep(fault.seconds)
            whole = json.dumps(completion(fault.content, fault.finish, **fault.message))
            self.reply(fault.status, whole if fault.body is None else fault.body)

        def reply(self, status, body):
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body.encode())
            except (BrokenPipeError, ConnectionResetError):
                pass  # who asked did not wait

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.asked, server.keys = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
