"""The policy served over chat APIs, and the capture of the calls of programs.

    messages   requests and replies in one form, whatever API they came by; errors by name
    chat, responses, anthropic    the three APIs: requests read, replies, streams and errors written
    server     the HTTP server: routes, keys, handlers
    capture    calls of a program as the turns of one branch
    policy     the handler outside of runs: renders, samples, streams
    openenv, sessions    the other way round: environments served by the protocol of OpenEnv

A rollout asks; a program asks too. So a program's environment turns the two around: the call that
the program makes is the observation, the action of the policy is the answer to it. The tree, its
token ids, entropies, forks, limits and journal are those of any rollout.

    endpoint = await shared_endpoint()          one HTTP server on loopback for each process
    session = endpoint.open()                   one branch; the key of its calls is session.key
                                                (thoughts="text": for programs that drop thoughts)
    start the program with session.variables    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_...
                                                within a sandbox: forward endpoint.port into it

    call = await session.next()                 its next call; waits. The environment waits at the
                                                same time for the end of the process
    reset   ->  call.messages, {"tools": call.tools, "turn": call.turn}
    step    ->  session.answer(action)          the reply to the call, by the action of the rollout
                call = await session.next()
                call.messages, 0.0, False, False, {"turn": call.turn}
    fork    ->  other = endpoint.open(after=session, same=same)
                start a fresh program with other.variables: calls that `session` has had answered
                are answered from its record as long as `same(recorded, now)` says so of the two
                calls; `await other.ready()` returns once the call that `session` has not
                answered yet came in, equal too, or raises DivergedError, which names the cause
    finish  ->  session.close()                 calls that wait get an error of their API
    close   ->  endpoint.forget(session)        likewise, and its key is nobody's any more

`call.messages` are the new messages since the turn that the call continues. `call.turn` (`NextTurn`
in agentenv/types.py) says where the rollout continues and which parameters the call has:
stop strings, most tokens. A call that continues an older turn, or none, needs nothing of
the environment: the rollout reads `turn`. What a session has counted is in `session.counts`
(`calls`, `context/retry`, `context/sub_agent`, `altered/trimmed`, `replayed`, ...): add it to the
info of the last step as {"endpoint": session.counts}.
"""
