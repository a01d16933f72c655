"""`WS /v1/audio/speech/stream`: text in piece by piece, sound out while it arrives.

One endless stream a socket. The client's first message is `session.config`; then come
`input.text`, `input.done`, `input.clear` and `session.close` (`messages.py`), in any order. Sound
goes out in binary messages, one continuous encoder's; what it is about goes out as JSON:
`session.ready`, `speech.done` (all text before an `input.done` has been said), `input.cleared`,
`error` and `session.closed`. A server that is told to end says what it has, and closes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import WebSocket, WebSocketDisconnect

from bounded_kv_server.errors import SpeechError, as_status, ending
from bounded_kv_server.inbox import Inbox
from bounded_kv_server.limits import Expired, within
from bounded_kv_server.messages import Config
from bounded_kv_server.metrics import Clock
from bounded_kv_server.outbox import Outbox
from bounded_kv_server.server import SpeechServer, server_of
from bounded_kv_server.session import Session

POLICY, FAILED, TRY_AGAIN = 1008, 1011, 1013
"""WebSocket close codes (RFC 6455 and its registry)."""


async def converse(socket: WebSocket) -> None:
    """A socket's whole life."""
    await socket.accept()
    server, clock, outcome = server_of(socket.app), Clock(), "ok"
    outbox = Outbox(socket, server.settings.speech_idle_s)
    try:
        server.speaking()
        async with Inbox(socket, server.settings.max_speech_input) as inbox:
            end = asyncio.create_task(inbox.end_at(server.ending))
            try:
                await inbox.while_here(_talk(server, inbox, outbox, clock))
            finally:
                end.cancel()
        with suppress(WebSocketDisconnect):
            await outbox.close()
    except WebSocketDisconnect:
        outcome = "left"
    except SpeechError as error:
        outcome = _outcome(error, clock)
        await _end(outbox, error)
    except Exception as error:
        failure = as_status(error)
        outcome = _outcome(failure, clock)
        await _end(outbox, failure)
    finally:
        clock.close(outcome)


async def _talk(server: SpeechServer, inbox: Inbox, outbox: Outbox, clock: Clock) -> None:
    """From the client's first message to the last sound."""
    idle_s, longest_s = server.settings.speech_idle_s, server.settings.max_session_s
    async with within(idle_s, Expired(f"no message for {idle_s:g} s (--speech-idle-s)")):
        config = await inbox.next()
    if not isinstance(config, Config):  # not the client's: the server ends
        raise ending()
    server.check_model(config.model)
    async with server.gate.place():
        session = Session(server, config, inbox, outbox, clock)
        late = Expired(f"open for {longest_s:g} s, as long as a socket may be (--max-session-s)")
        async with within(longest_s, late):
            await session.run()


def _outcome(error: SpeechError, clock: Clock) -> str:
    if isinstance(error, Expired):
        return "expired"
    if clock.first_s is not None:
        return "broken"
    return "failed" if error.status == 500 else "refused"


async def _end(outbox: Outbox, error: SpeechError) -> None:
    code = {503: TRY_AGAIN, 500: FAILED}.get(error.status, POLICY)
    with suppress(WebSocketDisconnect, RuntimeError):
        await outbox.tell("error", **error.body())
        await outbox.close(code)
