"""The policy served over chat APIs, and the capture of the calls of programs.

    messages   requests and replies in a common form for all APIs; named errors
    chat, responses, anthropic    the three APIs: parse requests, write replies, streams and errors
    server     the HTTP server: routes, keys, handlers
    capture    calls of a program as the turns of one branch
    policy     the handler outside of runs: renders, samples, streams
    openenv, sessions    the converse: environments served by OpenEnv's protocol

In a captured program the program calls the policy, whereas a rollout calls the environment. The
program's environment inverts this: a call of the program is an observation, and the policy's action
is the answer to it. The tree, its token ids, entropies, forks, limits and journal are those of any
rollout.

    endpoint = await shared_endpoint()          one HTTP server on loopback per process
    session = endpoint.open()                   one branch; the key of its calls is session.key
                                                (thoughts="text": for programs that drop thoughts)
    start the program with session.variables    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_...
                                                in a sandbox: forward endpoint.port into it

    call = await session.next()                 wait for its next call; the environment must also
                                                wait for the end of the process
    reset   ->  call.messages, {"tools": call.tools, "turn": call.turn}
    step    ->  session.reply(action)           the reply to the call, by the action of the rollout
                call = await session.next()
                call.messages, 0.0, False, False, {"turn": call.turn}
    fork    ->  other = endpoint.open(after=session, normal=normal)
                start a fresh program with other.variables: the answered calls of `session` are
                answered from its record, as long as `normal` gives the same for both calls;
                `await other.ready()` returns when the pending call of `session` has arrived, equal
                too, or raises DivergedError, which names the cause
    finish  ->  session.close()                 pending calls get an error of their API
    close   ->  endpoint.forget(session)        likewise, and its key becomes invalid

`call.messages` has the new messages since the turn that the call continues. `call.turn` (`NextTurn`
in agentenv/base/types.py) describes where the rollout continues, and the call's stop strings and
token limit. The rollout handles it, also for a call that continues an older turn or none. The
counters of a session are in `session.counts` (`calls`, `context/retry`, `context/sub_agent`,
`altered/trimmed`, `replayed`, ...): add them to the info of the last step as {"endpoint":
session.counts}.
"""
