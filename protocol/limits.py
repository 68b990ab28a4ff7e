"""The limits on what a peer accepts, keeps or sends, each with its reason. Pure."""

from typing import Final

PROTOCOL_VERSION: Final = 6
"""Version of the protocol. Peers of another version are refused at join, so messages need no compatibility fields."""

CONTROL_BYTES_MAX: Final = 256 * 1024
"""Most bytes of a control message. A plan for 1,000 peers has about 80 KiB, and a `PlanOffer` contains two plans."""
ENVELOPE_BYTES_MAX: Final = 1024
"""Most bytes that the envelope and the fixed fields of a control message take together."""
CONTROL_DEPTH_MAX: Final = 8
"""Greatest depth to which a control message nests lists and maps. Ours nest four deep, hivemind's DHT records two."""
RECORD_BYTES_MAX: Final = 32 * 1024
"""Most bytes of a directory value. hivemind silently loses values from 4 MiB on; small values also keep reads fast."""
KEY_BYTES_MAX: Final = 2 * 1024 * 1024
"""Most bytes of all directory values under one key: hivemind sends no reply of 4 MiB, and smaller ones take seconds on
a home line. The adverts of 1,000 peers with eight addresses each have 1.2 MB; if all are relayed, 1.8 MB."""
RECORD_EXPIRES_S_MAX: Final = 2 * 3600
"""Longest life of a directory record: a node keeps even a stranger's record that long. Ours live half an hour."""

FRAME_META_BYTES_MAX: Final = 4 * 1024
FRAME_PAYLOAD_BYTES_MAX: Final = 256 * 1024 * 1024
"""Most bytes of one tensor frame's payload: an activation of 8 x 4096 tokens, 4096 wide, in bf16."""
STREAM_CREDIT_BYTES: Final = 64 * 1024 * 1024
"""Most bytes of a stream's frames that are in flight or not yet handled at a time. A larger frame is sent alone."""
BULK_CHUNK_BYTES: Final = 1024 * 1024
"""Bytes of a chunk, in which gradient parts and state are sent, so that an activation never waits long behind one."""

REPLAY_WINDOW: Final = 4096
"""Calls with a sequence number this far below the sender's highest one are refused; a peer has fewer in flight."""
CALL_TIMEOUT_S: Final = 10.0
"""Timeout of a control call. It only frees the call's resources: dead peers are detected by measured round trips."""

CERTIFICATE_BYTES_MAX: Final = 256
"""Most bytes of a certificate. Ours have 180: two signatures of 64 bytes, a key of 32 and the invite's terms."""
OPEN_NEWCOMERS_MIN: Final = 4
"""Most newcomers that an open run has on probation at a time, or half the number of members if that is more. This slows
down an attacker that invents peers."""
OPEN_PROBATION_S: Final = 60.0
"""Seconds for which a newcomer's claimed speeds count as at most the median peer's; then they have been measured."""
OPEN_PER_NETWORK_MAX: Final = 32
"""Most members of an open run from one network (IPv4 /24, IPv6 /48); all without a public address count as one."""
EXCLUDED_KEYS_MAX: Final = 640
"""Most keys in one exclusion order, each with its invite: such an order has 45 KiB, and every plan carries it."""
EXCLUSION_BYTES_MAX: Final = 48 * 1024
"""Most bytes of a plan's exclusion orders: one of `EXCLUDED_KEYS_MAX` keys, or of fewer and 64 electors' signatures."""
EXCLUSIONS_MAX: Final = 16
"""Most exclusion orders in a plan, the owner's included. As many further orders may be collecting votes."""
PLANS_SERVED: Final = 16
"""How many of the newest plans that we obeyed can give a peer its role: a member that drains may be missing from the
newest plan, and with many joins and losses there may be a plan a second."""
PLAN_WAIT_S: Final = 2.0
"""Longest wait of a message for a plan that permits it. A plan spreads in two round trips; frames may overtake it."""
REFUSALS_LOGGED_S: Final = 1.0
WAITING_FOR_PLAN_MAX: Final = 256
"""Most messages that wait for a plan at a time, a sixteenth of them from one sender; further messages are refused."""
PEER_NAME_CHARS_MAX: Final = 40
PEER_ID_CHARS_MAX: Final = 64
"""Most characters of a peer ID. Our own IDs have 52."""
ADDRESSES_MAX: Final = 8
ADDRESS_CHARS_MAX: Final = 256
"""Most characters of a multiaddr. A relayed one has two peer IDs of 52 characters and an address."""
STAGES_MAX: Final = 256
PEERS_MAX: Final = 20_000
TERM_MAX: Final = 1 << 48
"""Highest leadership term of a plan, grant or claim. If a term were close to 2^64, no later term could be higher."""
SEQUENCE_MAX: Final = 1 << 48
"""Highest `Plan.sequence`, and highest `Plan.seed`."""
OVERRIDE_EPOCH_MAX: Final = 1 << 32
ERA_MAX: Final = 1 << 48
VERSION_MAX: Final = 1 << 48
TERM_JUMP_MAX: Final = 1 << 20
"""Largest rise of the term at once: a term a minute for two years. So at least 2^28 voted plans precede `TERM_MAX`."""
SEQUENCE_JUMP_MAX: Final = 1 << 20
ERA_JUMP_MAX: Final = 1 << 16
"""Largest rise of the era (training generation) in a plan: a new era exceeds all that members know or have on disk."""
ELECTED_FROM_PEERS: Final = 256
"""If a plan has more members than this, its voters (electors) are drawn by lot. The 129 votes of a majority of 256 have
9 KiB and take 15 ms to check."""
ELECTORS: Final = 127
"""Number of electors drawn. If a third of all members lie, liars have a majority in one plan of nineteen thousand."""
LINKS_KEPT_BYTES: Final = 4 * 1024 * 1024
"""Most bytes of plans with votes, kept for peers that were away: a day's plans with 9 peers, an hour's with 1,000."""
LINKS_PER_REPLY_MAX: Final = 64
"""Plans with their votes (links of the chain) in one reply: the receiver checks a majority's signatures in each."""
EXPERTS_MAX: Final = 1024
EXPERTS_PER_FRAME_MAX: Final = 256
"""Most experts for which one frame has tokens, since the frame's header takes a few bytes to name each expert."""
QUEUED_TOKENS_MAX: Final = 4096
"""Most expert requests in a peer's queue. Each microbatch in flight makes requests for only one layer at a time."""
QUEUED_TOKENS_OF_ONE_MAX: Final = QUEUED_TOKENS_MAX // 8
"""Most unanswered expert requests of one sender in the queue; a sender has fewer microbatches in flight than this."""
REFUSED_TOKENS_OF_ONE_MAX: Final = 64
"""Most refusals of expert requests in flight to one sender, or to all strangers together; others are dropped."""
MICROBATCHES_PER_STEP_MAX: Final = 4096
INFERENCE_TOKENS_MAX: Final = 4096
"""Most tokens of one inference request, all rows together: an fp32 activation of width 8,192 then has 128 MiB."""
INFERENCES_OF_ONE_MAX: Final = 4
"""Most inference requests of one client that a peer serves at once."""
INFERENCES_MAX: Final = 16
"""Most inference requests that a peer serves at once for all clients; also the most requests that it takes over from
other peers and that wait for its device."""
INFERENCE_CANDIDATES_MAX: Final = 16_384
"""Most tokens in an inference answer: the likeliest, with logits, in 128 KiB. A smaller vocabulary is sent whole."""

WAITING_STREAMS_OF_ONE_MAX: Final = 2
"""Most streams of one peer that have brought no HELLO yet. An honest peer opens one, and another after a break."""
WAITING_STREAMS_MAX: Final = 256
"""Most streams of all peers that have brought no HELLO yet. Each is an open file, and a process often has 1,024. If a
thousand peers open streams to a newcomer at once, those beyond the limit try again a round trip later."""
CARRIED_STREAMS_OF_ONE_MAX: Final = 32
"""Most streams that a peer carries (passes on) for one member. With each of eight other members, a member needs two for
frames and up to two for calls."""
CARRIED_STREAMS_MAX: Final = 128
"""Most streams that a peer carries for all members; each has two open files and up to 400 KB of waiting bytes."""
CARRIED_ARRIVING_OF_ONE_MAX: Final = 16
"""Most streams over one carrier (a third peer that passes them on) on which we still have to agree on keys."""
CARRIERS_ASKED_MAX: Final = 8
"""Most peers that we ask to carry one stream. Most peers connected to us are also connected to its other end."""
CARRIED_CALLS_MAX: Final = 64
"""Most calls of one member over a carrier (a third peer) that we answer at a time; we read further calls later."""
CONNECTIONS_OF_ADDRESS_MAX: Final = 128
"""Most TCP connections of one address with a peer's daemon, handshakes included (the daemon drops a handshake after 15
s); further connections wait. Enough for a building full of members behind one router."""
CONNECTIONS_OF_NETWORK_MAX: Final = 512
"""Most TCP connections of one public IPv4 network (/24) or IPv6 site (/48) with a peer's daemon, where an address
counts with at most 128: a stranger rents a network as easily as an address. A member has one or two connections."""
CONNECTIONS_OPENED_MAX: Final = 512
"""Most connections that a public address opens at once, even if it closes them: enough for 128 members with four each.
A network may open four times as many. Each costs the daemon 0.4 ms, for a key and a signature."""
CONNECTIONS_OPENED_PER_S: Final = 2.0
"""Connections that a public address may open per second in the long run: an honest member opens one after each cut."""
SHUT_OUT_S: Final = 60.0
"""A shut-out address is readmitted once it has had at most half the allowed connections for this long."""
SHUT_OUT_ADDRESSES_MAX: Final = 512
"""Most addresses and networks shut out at a time: the kernel's filter program has at most 4,096 instructions, and an
IPv6 network takes six."""
STRANGERS_REQUESTS_PER_S: Final = 50.0
"""Requests and streams per second, in the long run, that we read from all strangers (peers without a certificate) of
one network (/24, or /48 of IPv6): 3 % of a core at 0.6 ms each."""
STRANGERS_ALLOWANCE: Final = 1000.0
"""Requests that we read at once from all strangers of one network. A restarted peer knows no certificate, so each
member sends it a few requests before showing one, and a hundred members may share a network."""
ALLOWANCES_MAX: Final = 4096
"""Most strangers' networks and PeerIDs for which requests are counted; the least recent is forgotten first."""

LANES_MAX: Final = 8
"""TCP connections (lanes) of one frame stream beside the network daemon's. With packet loss one connection carries far
less than a home's uplink: 2.4 Mbit/s at 1 % loss and a round trip of 60 ms."""
LANES_OF_ALL_MAX: Final = 256
"""Most lanes (TCP connections) of all of a peer's streams: each is an open file, and a process may often have 1,024."""
WAITING_LANES_OF_ADDRESS_MAX: Final = 16
"""Most unauthenticated lanes (TCP connections) of an address: two members behind it may dial all theirs at once."""
LANE_PIECES_HELD_MAX: Final = 1 << 16
"""Most pieces of a stream's frames that wait for an earlier piece: credit allows 64 MiB, some thousand pieces."""

LAYERS_MAX: Final = 1024
"""Most decoder layers of a model: ten times the deepest of today. Peers keep a record of each layer."""
DIM_MAX: Final = 128 * 1024
"""Largest width of a model: six times the widest published (20,480). One layer of this width has 200 G parameters."""
FFN_DIM_MAX: Final = 8 * DIM_MAX
VOCABULARY_MAX: Final = 4 * 1024 * 1024
"""Most tokens of a vocabulary: sixteen times the largest published (262,144)."""
CONTEXT_MAX: Final = 16 * 1024 * 1024
"""Most tokens of a sample. The frame size is a stricter limit for most models."""
STEPS_MAX: Final = 10**9
"""Most steps of a run: one a second for thirty years, and far below 64 bits."""

SCENARIO_DEVICES_MAX: Final = 4096
"""Most devices of a network or scenario file: a matrix of their links then has 134 MB."""
NETWORK_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Most bytes of a network file: two matrices of 2,000 devices at eight characters a number, read in seconds."""
TOML_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of a run or scenario file. Python parses a megabyte of TOML in a third of a second."""
TRACE_BYTES_MAX: Final = 16 * 1024 * 1024
TRACE_EVENTS_MAX: Final = 100_000
"""Most joins and departures in a trace: twenty times the number in nine years of a cluster (LANL, system 16)."""
TRACE_REPLAYED_MAX: Final = 5_000_000
"""Most events that a simulation replays: those of a trace, times the number of copies that it replays side by side."""
REPORTS_PER_HEARTBEAT_MAX: Final = 16
HISTORY_PER_REPLY_MAX: Final = 256
HISTORY_COMMITS_MAX: Final = 2048
"""Most commits of its groups that a peer remembers (about 2 MB), for an observer that records the run and was away."""
FETCH_SOURCES_MAX: Final = 8
LINKS_PER_HEARTBEAT_MAX: Final = 16
UNSOUND_MAX: Final = 16
PROBES_PER_REPLY_MAX: Final = 4
TOGETHER_MAX: Final = 8
"""Most links that a peer measures at the same time, and most peers behind one network card that measure together."""
QUEUED_MICROBATCHES_MAX: Final = 1024
"""Most activations in the queue of a peer's stage; all honest stage-0 peers together have far fewer in flight."""

RECENT_PLANS_MAX: Final = 16
"""Most obeyed plans that a peer remembers: a drain takes 30 s, and a large swarm makes a plan every few seconds."""
RECENT_PLAN_S: Final = 60.0
"""Seconds for which we remember a plan after we began to obey the next one: a member that the next plan removes drains
for half a minute after it hears of that plan."""
DRAINING_S_MAX: Final = 120.0
"""Longest wait of a group for a removed member that still drains: twice the longest drain. Without this limit, a member
that claims for ever to drain would stop the group from reducing."""
DIGESTS_OF_ONE_MAX: Final = 32
"""Most versions for which we keep a member's digest. Its group waits for a digest that is at most half as many late."""
DIGEST_CHARS_MAX: Final = 64
"""Most characters of a digest in hex. Ours have 32."""
OPEN_STEPS_MAX: Final = 256
"""Contributions of a group member are noted only for steps less than this many ahead of our version. If a member is
further ahead, the group fetches that member's state to catch up; then the member repeats its contributions."""
ATTESTATIONS_OF_ONE_MAX: Final = 32
"""Most versions for which we keep one holder's signature of its state, while a newcomer joins."""
WITNESSED_VERSIONS_MAX: Final = 16
"""Most versions of its state that a holder keeps until the other holders' signatures arrive: a small model makes about
as many in a second. A holder of a large state keeps those that fit into `PINNED_BYTES_MAX`, but at least two."""
SIGNATURES_PER_OFFER_MAX: Final = 512
"""Most signatures in one `StateOffer`: a majority of 1,000 holders, about 60 KiB."""
HALTED_S_MAX: Final = 30.0
"""Longest pause of the run for one leaving member, which needs no longer to leave. The run pauses for that member again
only after the member has been away."""
REPAIRED_SHARE: Final = 0.05
"""Share of the run's microbatches, in the long run, that one member may ask others to compute again. It may also ask
for `s_max` + 2 whole steps at once: a stage loses these when its only holder dies, even if requested twice."""
RESTARTS_MAX: Final = 4.0
RESTARTS_PER_S: Final = 1 / 300
"""Restarts of a member per second that its group accepts in the long run; it accepts `RESTARTS_MAX` of them at once."""
SAVES_OF_ONE_MAX: Final = 4
"""Most versions that one leaving member may ask us to save, for its stage and its experts, until it has been away."""
KEEPING_SHARE: Final = 0.5
"""Largest share of the time, in the long run, that a peer spends on fetching copies of one member's state."""
KEEPING_AT_ONCE_S: Final = 60.0
"""Seconds that a member's copies may be ahead of `KEEPING_SHARE` (30 s of fetching), for the copy before it leaves."""
KEEPING_S_MIN: Final = 1.0
"""Fetching a copy counts as at least this long under `KEEPING_SHARE`, since each copy costs disk operations."""
PINNED_S_MAX: Final = 1800.0
"""Longest time that a version is kept for peers that read it, however often they ask: enough for 1.8 GB at 1 MB/s."""
PINNED_VERSIONS_MAX: Final = 4
"""Most versions kept (pinned) at a time. Further peers get the newest, or a refusal if they want a stored snapshot."""
PINNED_BYTES_MAX: Final = 2 * 1024**3
"""Most bytes of all pinned versions (kept for the peers that fetch them). A single version is kept however large."""
REPLAYED_BYTES_MAX: Final = 1024**3
"""Most bytes of reduced gradients kept for a newcomer to replay; a newcomer that needs more fetches a newer state."""
REPLAYED_STEPS_MIN: Final = 16
"""Least number of reduced gradients that are kept, even if they exceed `REPLAYED_BYTES_MAX`: a stage with gradients of
400 MB makes more than two steps while its state travels over a home line."""
LIGHT_STATE_S: Final = 60.0
"""A newcomer waits for its whole state if the download takes less time than this. On a slower line it first downloads
the weights, and trains with them as a learner while the state arrives (`../peer/membership/learner.py`). Weights take a
sixth of the time, so on a fast line they are not worth the extra download."""
