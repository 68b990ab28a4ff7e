"""Every bound on what a peer accepts, keeps or sends, each with its reason. Pure."""

from typing import Final

PROTOCOL_VERSION: Final = 6
"""Agreed at join: peers of another version are refused with a sentence, so messages need no compatibility fields."""

CONTROL_BYTES_MAX: Final = 256 * 1024
"""Bytes of a control message. A plan for 1,000 peers has about 80 KiB, and an offer carries two."""
ENVELOPE_BYTES_MAX: Final = 1024
"""Upper bound of what an envelope and a message's own fields take of a control message."""
CONTROL_DEPTH_MAX: Final = 8
"""Nesting depth of a control message. Ours nest four deep, hivemind's DHT records two."""
RECORD_BYTES_MAX: Final = 32 * 1024
"""Bytes of a directory value. hivemind silently loses values from 4 MiB on; small ones also keep reads fast."""
KEY_BYTES_MAX: Final = 2 * 1024 * 1024
"""Bytes of all directory values under one key: hivemind sends no reply of 4 MiB, and a home line needs seconds for
less. The adverts of 1,000 peers with eight addresses each have 1.2 MB, or 1.8 if all addresses are relayed."""
RECORD_EXPIRES_S_MAX: Final = 2 * 3600
"""Longest life of a directory record; nodes keep strangers' records that long. Ours live half an hour."""

FRAME_META_BYTES_MAX: Final = 4 * 1024
FRAME_PAYLOAD_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bytes of one tensor frame's payload: an activation of 8 x 4096 tokens, 4096 wide, in bf16."""
STREAM_CREDIT_BYTES: Final = 64 * 1024 * 1024
"""Bytes that a sender may have outstanding towards one receiver. A larger frame is sent alone."""
BULK_CHUNK_BYTES: Final = 1024 * 1024
"""Chunk size of gradient parts and state, so that an activation never waits long behind a chunk."""

REPLAY_WINDOW: Final = 4096
"""Calls that a sender may have out of order: more than one peer has in flight."""
CALL_TIMEOUT_S: Final = 10.0
"""Timeout that frees a control call's resources. Failure detection itself measures round trips."""

CERTIFICATE_BYTES_MAX: Final = 256
"""Bytes of a certificate: two signatures of 64, a key of 32 and the invite's terms make 180."""
OPEN_NEWCOMERS_MIN: Final = 4
"""Newcomers on probation at once in an open run, or half the members if that is more: it slows down made-up peers."""
OPEN_PROBATION_S: Final = 60.0
"""How long a newcomer's claims are capped at the median peer's; by then its neighbours have measured it."""
OPEN_PER_NETWORK_MAX: Final = 32
"""Members of an open run from one network of 256 addresses; and all members without a public address together."""
EXCLUDED_KEYS_MAX: Final = 640
"""Keys that one order may name, with their invites: such an order has 45 KiB, and every plan carries it."""
EXCLUSION_BYTES_MAX: Final = 48 * 1024
"""Bytes of one order: room for the signatures of a majority of 127 electors and fewer keys."""
EXCLUSIONS_MAX: Final = 16
"""Orders in a plan (the owner's is one), and as many others that are collecting votes."""
PLANS_SERVED: Final = 16
"""Obeyed plans that still give roles: a draining member has left the newest one, and churn can make a plan a second."""
PLAN_WAIT_S: Final = 2.0
"""How long a message waits for a plan that explains it. Plans spread in two round trips; frames may overtake them."""
REFUSALS_LOGGED_S: Final = 1.0
WAITING_FOR_PLAN_MAX: Final = 256
"""Messages waiting for a plan at once, a sixteenth of them from one sender; the rest are refused at once."""
PEER_NAME_CHARS_MAX: Final = 40
PEER_ID_CHARS_MAX: Final = 64
"""Characters of a peer ID. Our own IDs have 52."""
ADDRESSES_MAX: Final = 8
ADDRESS_CHARS_MAX: Final = 256
"""One multiaddr. A relayed one has two peer IDs of 52 characters and an address."""
STAGES_MAX: Final = 256
PEERS_MAX: Final = 20_000
TERM_MAX: Final = 1 << 48
"""The highest term of a plan, grant or claim: a number close to 2^64 could have no successor."""
SEQUENCE_MAX: Final = 1 << 48
"""The highest plan sequence, and the highest `Plan.seed`."""
OVERRIDE_EPOCH_MAX: Final = 1 << 32
ERA_MAX: Final = 1 << 48
VERSION_MAX: Final = 1 << 48
TERM_JUMP_MAX: Final = 1 << 20
"""How far a term may rise at once: two years of a term a minute. `TERM_MAX` is then 2^28 voted plans away."""
SEQUENCE_JUMP_MAX: Final = 1 << 20
ERA_JUMP_MAX: Final = 1 << 16
"""Eras that a plan may skip, because members have heard of them or have them on disk."""
ELECTED_FROM_PEERS: Final = 256
"""A plan with more members has its electors drawn by lot; 129 votes have 9 KiB and take 15 ms to check."""
ELECTORS: Final = 127
"""Electors drawn. If a third of all members lie, they get the majority of one plan in nineteen thousand."""
LINKS_KEPT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of live plans and votes kept for peers that were away: a day of terms with nine peers, an hour with 1,000."""
LINKS_PER_REPLY_MAX: Final = 64
"""Chain links in one reply: each has a majority's signatures to check."""
EXPERTS_MAX: Final = 1024
EXPERTS_PER_FRAME_MAX: Final = 256
"""Experts in one frame: its header names each of them in a few bytes."""
QUEUED_TOKENS_MAX: Final = 4096
"""Expert requests that a peer queues: one layer at a time of each microbatch in flight."""
QUEUED_TOKENS_OF_ONE_MAX: Final = QUEUED_TOKENS_MAX // 8
"""Queued requests of one sender that are not yet answered: more than its microbatches in flight."""
REFUSED_TOKENS_OF_ONE_MAX: Final = 64
"""Refusals in flight to one sender, or to all strangers together; further ones are dropped."""
MICROBATCHES_PER_STEP_MAX: Final = 4096
INFERENCE_TOKENS_MAX: Final = 4096
"""Tokens of one inference request, over all rows: in fp32, 8,192 wide, its activation has 128 MiB."""
INFERENCES_OF_ONE_MAX: Final = 4
"""Inference requests of one client that a peer serves at once."""
INFERENCES_MAX: Final = 16
"""Inference requests of all clients together, and remote ones that wait for a peer's device."""
INFERENCE_CANDIDATES_MAX: Final = 16_384
"""Likeliest tokens in an answer, with their logits, in 128 KiB; all tokens of a smaller vocabulary."""

WAITING_STREAMS_OF_ONE_MAX: Final = 2
"""Streams of one peer without a HELLO yet. An honest peer opens one, and another after a break."""
WAITING_STREAMS_MAX: Final = 256
"""Such streams of all peers together; each is an open file, and a process often has 1,024. When a thousand peers stream
at once to a newcomer, the others try again a round trip later."""
CARRIED_STREAMS_OF_ONE_MAX: Final = 32
"""Streams that a peer carries for one member: with each of eight others two of frames and one or two of calls."""
CARRIED_STREAMS_MAX: Final = 128
"""Streams that a peer carries in all; each has two open files and up to 400 KB of waiting bytes."""
CARRIED_ARRIVING_OF_ONE_MAX: Final = 16
"""Streams through one carrier before their ends have agreed on keys."""
CARRIERS_ASKED_MAX: Final = 8
"""Peers that are asked to carry one stream. Most peers connected to us are also connected to the other end."""
CARRIED_CALLS_MAX: Final = 64
"""Calls of one member over a carrier that are being answered; the next ones are read later."""
CONNECTIONS_OF_ADDRESS_MAX: Final = 128
"""TCP connections of one address with a peer's daemon, handshakes included (the daemon drops those after 15 s); new
ones beyond it wait. Enough for a building full of members behind one router."""
CONNECTIONS_OF_NETWORK_MAX: Final = 512
"""The same for a public IPv4 network (/24) or the IPv6 networks of one site (/48), where each address counts with 128
at most: a stranger rents a network as easily as an address. Members have a connection or two each."""
CONNECTIONS_OPENED_MAX: Final = 512
"""Connections that a public address may open at once, closed ones included: each of 128 members four times. A network
may open four times as many. Each costs the daemon 0.4 ms, for a key and a signature."""
CONNECTIONS_OPENED_PER_S: Final = 2.0
"""The same per second, in the long run: honest members open one after each cut."""
SHUT_OUT_S: Final = 60.0
"""An address is readmitted after it has had half the allowed connections for this long."""
SHUT_OUT_ADDRESSES_MAX: Final = 512
"""Addresses and networks shut out at a time: kernel programs have 4,096 instructions, and an IPv6 network takes six."""
STRANGERS_REQUESTS_PER_S: Final = 50.0
"""Requests and streams read from all strangers of one network (/24, or /48 of IPv6): 3 % of a core at 0.6 ms each."""
STRANGERS_ALLOWANCE: Final = 1000.0
"""Requests of them that may come at once. A restarted peer knows no certificate, so each member sends it a few requests
before it shows one, and a hundred members may share a network."""
ALLOWANCES_MAX: Final = 4096
"""Networks with a request counter; the least recent one is forgotten first."""

LANES_MAX: Final = 8
"""TCP connections of one frame stream beside the network daemon's. With packet loss one connection carries far less
than a home's uplink: 2.4 Mbit/s at 1 % and 60 ms."""
LANES_OF_ALL_MAX: Final = 256
"""Lanes of all of a peer's streams: each is an open file, and a process often has 1,024."""
WAITING_LANES_OF_ADDRESS_MAX: Final = 16
"""Unauthenticated connections of one address: two members behind one router may dial all their lanes at once."""
LANE_PIECES_HELD_MAX: Final = 1 << 16
"""Out-of-order pieces of one stream. Credit bounds their bytes; 64 MiB of honest pieces are some thousand."""

LAYERS_MAX: Final = 1024
"""Decoder layers of a model: ten times the deepest of today. Peers keep a record of each."""
DIM_MAX: Final = 128 * 1024
"""Width of a model: six times the widest published (20,480). One such layer has 200 G parameters."""
FFN_DIM_MAX: Final = 8 * DIM_MAX
VOCABULARY_MAX: Final = 4 * 1024 * 1024
"""Tokens: sixteen times the largest published (262,144)."""
CONTEXT_MAX: Final = 16 * 1024 * 1024
"""Tokens of a sample. The frame size bounds them further."""
STEPS_MAX: Final = 10**9
"""Steps of a run: one a second for thirty years, far from 64 bits."""

SCENARIO_DEVICES_MAX: Final = 4096
"""Devices of a network or scenario file: the matrices between them then have 134 MB each."""
NETWORK_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of a network file: two matrices of 2,000 devices at eight characters a number. It is read in seconds."""
TOML_BYTES_MAX: Final = 1024 * 1024
"""Bytes of a run or scenario file. Python parses a megabyte of TOML in a third of a second."""
TRACE_BYTES_MAX: Final = 16 * 1024 * 1024
TRACE_EVENTS_MAX: Final = 100_000
"""Joins and departures in a trace: twenty times those of nine years of a cluster (LANL, system 16)."""
TRACE_REPLAYED_MAX: Final = 5_000_000
"""Events of a trace times the copies of it that run side by side."""
REPORTS_PER_HEARTBEAT_MAX: Final = 16
HISTORY_PER_REPLY_MAX: Final = 256
HISTORY_COMMITS_MAX: Final = 2048
"""Past commits of all its groups that a peer remembers (about 2 MB), for a record keeper that was away."""
LINKS_PER_HEARTBEAT_MAX: Final = 16
UNSOUND_MAX: Final = 16
PROBES_PER_REPLY_MAX: Final = 4
TOGETHER_MAX: Final = 8
"""Links that a peer probes together, and peers of its machine that take part."""
QUEUED_MICROBATCHES_MAX: Final = 1024
"""Activations that a stage queues; the windows of honest stage-0 peers add up to far less."""

RECENT_PLANS_MAX: Final = 16
"""Obeyed plans that a peer remembers. A large swarm makes one every few seconds, and a drain takes thirty."""
RECENT_PLAN_S: Final = 60.0
"""How long a plan counts after its successor: a drain takes half a minute from when the member hears of that."""
DRAINING_S_MAX: Final = 120.0
"""How long a group waits for a removed member that says it drains: twice the longest drain. Without a bound, a member
that keeps saying so would stop the group from reducing."""
DIGESTS_OF_ONE_MAX: Final = 32
"""Versions for which one member's digest is kept: twice as long as a round waits for comparison."""
DIGEST_CHARS_MAX: Final = 64
"""Characters of a digest in hex. Ours have 32."""
OPEN_STEPS_MAX: Final = 256
"""How many steps ahead of our version a group member's contributions are noted. A group catches up with a member that
is further ahead by fetching its state, and that member repeats its contributions to the step that is due."""
ATTESTATIONS_OF_ONE_MAX: Final = 32
"""Versions for which one holder's signature is kept while a newcomer joins."""
WITNESSED_VERSIONS_MAX: Final = 16
"""Versions that a holder keeps until the other holders' signatures arrive: a second of a small model's steps. For large
states as many as fit into `PINNED_BYTES_MAX`, two at least."""
SIGNATURES_PER_OFFER_MAX: Final = 512
"""Signatures in one offer: a majority of 1,000 holders, about 60 KiB."""
HALTED_S_MAX: Final = 30.0
"""How long the run pauses for one leaving member, as long as a leave takes; once, until it has been away."""
REPAIRED_SHARE: Final = 0.05
"""Long-run share of the run's microbatches that one member may have repeated, beside `s_max` + 2 whole steps at once:
what a stage lacks when its only holder dies, requested twice."""
RESTARTS_MAX: Final = 4.0
RESTARTS_PER_S: Final = 1 / 300
"""Restarts of a group member that others follow: a burst, and a rate in the long run."""
SAVES_OF_ONE_MAX: Final = 4
"""Versions that one leaving member may have us save before it has been away: its stage's, and its experts'."""
KEEPING_SHARE: Final = 0.5
"""Long-run share of time in which a peer fetches copies for one member."""
KEEPING_AT_ONCE_S: Final = 60.0
"""Time beyond that share for one member's copies: its last copy before leaving follows a scheduled one."""
KEEPING_S_MIN: Final = 1.0
"""Least time that a copy counts, since each costs disk operations."""
PINNED_S_MAX: Final = 1800.0
"""Longest time that a version is kept for its readers, however often they ask: 1.8 GB at 1 MB/s."""
PINNED_VERSIONS_MAX: Final = 4
"""Versions pinned for others at a time, in memory and on disk. Further requests get the newest pinned one."""
PINNED_BYTES_MAX: Final = 2 * 1024**3
"""Bytes of pinned versions. One version is always kept, however large."""
REPLAYED_BYTES_MAX: Final = 1024**3
"""Bytes of reduced gradients kept for a newcomer to replay; a newcomer that needs more fetches a newer state."""
REPLAYED_STEPS_MIN: Final = 16
"""Reduced gradients kept at least: with gradients of 400 MB a stage steps faster than its state travels on a home
line."""
LIGHT_STATE_S: Final = 60.0
"""A newcomer waits for its state if it arrives within this time; on a slower line it trains as a learner, with weights
first (`../peer/membership/learner.py`). Weights take a sixth of the time, so below this they are not worth the extra
download."""
