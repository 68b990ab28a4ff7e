"""Every bound on what a peer accepts, keeps or sends. One place, each with its reason. Pure."""

from typing import Final

PROTOCOL_VERSION: Final = 6
"""Agreed at join; peers of another version are refused with a sentence, so messages may be strict."""

CONTROL_BYTES_MAX: Final = 256 * 1024
"""A control message on the wire. A plan for 1,000 peers is about 80 KiB, and an offer carries two."""
CONTROL_DEPTH_MAX: Final = 8
"""Nesting of a control message. Ours nest four deep; hivemind's own DHT records two."""
RECORD_BYTES_MAX: Final = 32 * 1024
"""A directory value. From 4 MiB hivemind stores it nowhere and says True; small records also keep a get fast."""
KEY_BYTES_MAX: Final = 2 * 1024 * 1024
"""All directory values under one key: hivemind sends no reply of 4 MiB, and a home line needs seconds for less. The
adverts of 1,000 peers with eight addresses each are 1.2 MB, or 1.8 if all of these are relayed ones."""
RECORD_EXPIRES_S_MAX: Final = 2 * 3600
"""How far ahead a directory record may expire: nodes keep what strangers store until then. Ours last half an hour at
most; the rest is for clocks that are an hour ahead."""

FRAME_META_BYTES_MAX: Final = 4 * 1024
"""The header of one tensor frame."""
FRAME_PAYLOAD_BYTES_MAX: Final = 256 * 1024 * 1024
"""The payload of one tensor frame: an activation of 8 x 4096 tokens x 4096 wide in bf16."""
STREAM_CREDIT_BYTES: Final = 64 * 1024 * 1024
"""What a sender may have outstanding towards one receiver. One frame larger than this goes alone."""
BULK_CHUNK_BYTES: Final = 1024 * 1024
"""Gradient parts and state travel in chunks of this size, so that an activation never waits long behind one."""

REPLAY_WINDOW: Final = 4096
"""How far back a sender's call sequence may reach: more than the calls one peer has in flight."""
CALL_TIMEOUT_S: Final = 10.0
"""A control call's bound. Failure detection proper measures round trips; this only frees the resources."""

CERTIFICATE_BYTES_MAX: Final = 256
"""A member's certificate: two signatures of 64 bytes, a key of 32, and the invite's terms make 180."""
OPEN_NEWCOMERS_MIN: Final = 4
"""Newcomers on probation at once in an open run, or half as many as are there: no more made-up peers come a minute."""
OPEN_PROBATION_S: Final = 60.0
"""A newcomer counts as the median peer at most for so long; by then its neighbours have measured whether it works."""
OPEN_PER_NETWORK_MAX: Final = 32
"""Members of an open run from one network of 256 addresses, and all those together that tell no public address."""
EXCLUDED_KEYS_MAX: Final = 640
"""Keys that one order may name, each with its invite's: such an order has 45 KiB, and every plan carries it."""
EXCLUSION_BYTES_MAX: Final = 48 * 1024
"""One order, with the signatures of a majority of 127 electors beside fewer keys."""
EXCLUSIONS_MAX: Final = 16
"""Orders that a plan carries, and others that are collecting votes: the owner's is one."""
PLANS_SERVED: Final = 16
"""How many of the plans obeyed last give their members a place: who drains has left a plan, and during churn a plan a
second is made."""
PLAN_WAIT_S: Final = 2.0
"""How long a member's message waits for the plan that gives the member its place: a plan reaches everybody within two
round trips, and frames of a new layout overtake it."""
REFUSALS_LOGGED_S: Final = 1.0
"""Between lines of the log about calls that were refused."""
WAITING_FOR_PLAN_MAX: Final = 256
"""Messages that wait for a plan at once, and of one sender a sixteenth of that; what is more is refused at once."""
PEER_NAME_CHARS_MAX: Final = 40
PEER_ID_CHARS_MAX: Final = 64
"""Characters of a peer ID that others name. Our own IDs have 52."""
ADDRESSES_MAX: Final = 8
ADDRESS_CHARS_MAX: Final = 256
"""One multiaddr. Through a relay: two peer IDs of 52 characters and an address."""
STAGES_MAX: Final = 256
PEERS_MAX: Final = 20_000
TERM_MAX: Final = 1 << 48
"""The highest term of a plan, a grant or a claim. A term a minute comes to this in five hundred million years; a number
close to what a message can hold (2^64) could not be followed by another."""
SEQUENCE_MAX: Final = 1 << 48
"""The highest sequence of a plan, and the highest `Plan.seed`."""
REIGN_MAX: Final = 1 << 32
"""Mandates that an owner may give."""
ERA_MAX: Final = 1 << 48
VERSION_MAX: Final = 1 << 48
"""Steps of a run."""
TERM_JUMP_MAX: Final = 1 << 20
"""How much higher a term may be at once: two years of terms, of a minute each. From here to `TERM_MAX` are 2^28 plans,
each with a majority's votes."""
SEQUENCE_JUMP_MAX: Final = 1 << 20
"""How many sequences a plan may skip: offers that did not go live, of which there are a few a minute at worst."""
ERA_JUMP_MAX: Final = 1 << 16
"""How many eras a plan may skip, because members have heard of them or have them on disk."""
ELECTED_FROM_PEERS: Final = 256
"""A plan with more members than this has its electors drawn; 129 votes are 9 KiB and 15 ms of signatures to check."""
ELECTORS: Final = 127
"""How many are drawn. If a third of all members lie, they are most of the electors of one plan in nineteen thousand."""
LINKS_KEPT_BYTES: Final = 4 * 1024 * 1024
"""Live plans with their votes that a peer keeps for those who were away: a day of terms in a swarm of nine, an hour of
them with 1,000 peers."""
LINKS_PER_REPLY_MAX: Final = 64
"""Links of the chain in one reply: each has a majority's signatures to check."""
EXPERTS_MAX: Final = 1024
"""Experts in one layer."""
EXPERTS_PER_FRAME_MAX: Final = 256
"""Experts whose tokens go in one frame: its meta names each of them, in a few bytes."""
QUEUED_TOKENS_MAX: Final = 4096
"""Requests for experts that a peer will hold: those of each microbatch under way, one a layer at a time."""
QUEUED_TOKENS_OF_ONE_MAX: Final = QUEUED_TOKENS_MAX // 8
"""Queued requests of one sender, until it has their answers: more than it has microbatches under way."""
REFUSED_TOKENS_OF_ONE_MAX: Final = 64
"""Refusals of such requests on their way to one sender, or to all strangers together; what is more is dropped."""
MICROBATCHES_PER_STEP_MAX: Final = 4096
INFERENCE_TOKENS_MAX: Final = 4096
"""Tokens of one request to the model, over all of its rows: at a width of 8,192 in fp32 its activation has 128 MiB."""
INFERENCES_OF_ONE_MAX: Final = 4
"""Requests of one asker that a peer sees to at once."""
INFERENCES_MAX: Final = 16
"""Such requests of all askers together; and what a peer has waiting for its device of what came from others."""
INFERENCE_CANDIDATES_MAX: Final = 16_384
"""The likeliest tokens that an answer names with their logits, in 128 KiB; all, where the vocabulary has no more."""

WAITING_STREAMS_OF_ONE_MAX: Final = 2
"""Streams of one peer whose HELLO has not come. An honest one opens one, and another once that broke."""
WAITING_STREAMS_MAX: Final = 256
"""Waiting streams of all peers together; each is an open file of ours, and a process often has 1,024. A thousand peers
that stream at once to one newcomer need a round trip each, and try again."""
CARRIED_STREAMS_OF_ONE_MAX: Final = 32
"""Streams that a peer carries from or to one member: two of frames and one or two of calls for each of eight others."""
CARRIED_STREAMS_MAX: Final = 128
"""Streams that a peer carries in all; each is two open files, and up to 400 KB that wait."""
CARRIED_ARRIVING_OF_ONE_MAX: Final = 16
"""Streams that one carrier has brought to us and whose ends have not agreed on keys."""
CARRIERS_ASKED_MAX: Final = 8
"""Peers that are asked to carry one stream. Of those who have a connection with us most have one with the other end."""
CARRIED_CALLS_MAX: Final = 64
"""Calls of one member that came over a carrier and are being answered; the next ones are read later."""
CONNECTIONS_OF_ADDRESS_MAX: Final = 128
"""TCP connections that one address may have with a peer's daemon before new ones of it have to wait: a building full of
members behind one router. Those in the middle of a handshake count, of which the daemon drops each after 15 s."""
CONNECTIONS_OF_NETWORK_MAX: Final = 512
"""The same for a public network of 256 IPv4 addresses (/24), or of the IPv6 networks of one site (/48), whose addresses
count with 128 each at most: a stranger rents a network as easily as an address. A swarm's members in one such network
have a connection or two each."""
CONNECTIONS_OPENED_MAX: Final = 512
"""Connections that a public address may open at once, closed ones included: each of 128 members four times. A network
may open four times as many, as it may have. The daemon pays 0.4 ms for each, a key and a signature."""
CONNECTIONS_OPENED_PER_S: Final = 2.0
"""The same in the long run, a second: honest members open one after each cut."""
SHUT_OUT_S: Final = 60.0
"""An address must have had half as many connections for so long before it is let in again."""
SHUT_OUT_ADDRESSES_MAX: Final = 512
"""Addresses and networks shut out at a time. The kernel takes programs of 4,096 instructions, and an IPv6 network needs
six."""
STRANGERS_REQUESTS_PER_S: Final = 50.0
"""Requests and streams of all strangers of one network (/24, or /48 of IPv6) that are looked at: at 0.2 to 0.6 ms each
they take at most 3 % of a core."""
STRANGERS_ALLOWANCE: Final = 1000.0
"""How many may come at once. A peer that restarts knows no certificate: each member sends it a few requests until it
has shown one, and a hundred members may be in one network."""
ALLOWANCES_MAX: Final = 4096
"""Networks of which is remembered what came; the one that came longest ago is forgotten first."""

LANES_MAX: Final = 8
"""TCP connections that one stream of frames may have beside the network daemon's. What one carries over a way that
loses packets is far less than a home's uplink: at 1 % and 60 ms 2.4 Mbit/s."""
LANES_OF_ALL_MAX: Final = 256
"""Such connections of all streams of a peer: each is an open file, and a process often has 1,024."""
WAITING_LANES_OF_ADDRESS_MAX: Final = 16
"""Connections from one address whose other end has not proved who it is: two members behind one router that dial all of
their lanes at once."""
LANE_PIECES_HELD_MAX: Final = 1 << 16
"""Pieces of one stream that wait for one before them. Credit bounds their bytes; of honest ones 64 MiB come to some
thousand."""

LAYERS_MAX: Final = 1024
"""Decoder layers of a model: ten times what the deepest of today has. Peers make a record of each."""
DIM_MAX: Final = 128 * 1024
"""Width of a model: six times the widest published (20,480). A layer of it is 200 G parameters."""
FFN_DIM_MAX: Final = 8 * DIM_MAX
VOCABULARY_MAX: Final = 4 * 1024 * 1024
"""Tokens: sixteen times the largest published (262,144)."""
CONTEXT_MAX: Final = 16 * 1024 * 1024
"""Tokens of a sample. What fits into a frame bounds them further."""
STEPS_MAX: Final = 10**9
"""Steps of a run: one a second for thirty years. Version numbers stay far from 64 bits."""

SCENARIO_DEVICES_MAX: Final = 4096
"""Devices of a network or scenario file. What lies between any two of them is in matrices: 134 MB each then."""
NETWORK_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A network file: two matrices of 2,000 devices, eight characters a number. Whatever is in it is read in seconds."""
TOML_BYTES_MAX: Final = 1024 * 1024
"""A run or scenario file. A long one has some kilobytes; Python reads a megabyte of TOML in a third of a second."""
TRACE_BYTES_MAX: Final = 16 * 1024 * 1024
TRACE_EVENTS_MAX: Final = 100_000
"""Comings and goings in a trace: twenty times what nine years of a cluster's failures have (LANL, system 16)."""
TRACE_REPLAYED_MAX: Final = 5_000_000
"""Events of a trace times the copies of it that run side by side."""
REPORTS_PER_HEARTBEAT_MAX: Final = 16
HISTORY_PER_REPLY_MAX: Final = 256
"""Past commits in one reply: 60 KiB."""
HISTORY_COMMITS_MAX: Final = 2048
"""Past commits that a peer remembers, of all groups in which it was: about 2 MB. A peer that keeps the run's record and
was away finds so much again."""
LINKS_PER_HEARTBEAT_MAX: Final = 16
UNSOUND_MAX: Final = 16
"""Members that a heartbeat names because what they contribute is no gradient."""
PROBES_PER_REPLY_MAX: Final = 4
TOGETHER_MAX: Final = 8
"""A peer probes so many links together, and so many of its machine take part."""
QUEUED_MICROBATCHES_MAX: Final = 1024
"""Activations a stage will hold; the windows of honest stage-0 peers add up to far less."""

RECENT_PLANS_MAX: Final = 16
"""Plans that a peer remembers having obeyed. A large swarm makes one every few seconds, and a drain takes thirty."""
RECENT_PLAN_S: Final = 60.0
"""How long a plan counts after the next one: who drains has half a minute, and hears of that plan a little later."""
DEPARTING_S_MAX: Final = 120.0
"""How long a group waits for a member that the plan has dropped and that says it drains. Twice what a drain may take
with all its good-byes; one that goes on saying so would keep the group from reducing."""
DIGESTS_OF_ONE_MAX: Final = 32
"""Versions of which one group member's digest is kept: twice as many as a round waits to be compared."""
DIGEST_CHARS_MAX: Final = 64
"""A digest in hex: 256 bits. Ours have 128."""
OPEN_STEPS_MAX: Final = 256
"""How far ahead of our version a group member's contributions are noted. A group follows a member that is further ahead
by fetching what it has committed, and that member says again later what it has of the step that is due."""
ATTESTATIONS_OF_ONE_MAX: Final = 32
"""Versions of which one holder's signature is kept while somebody joins."""
WITNESSED_VERSIONS_MAX: Final = 16
"""Versions that a holder keeps while the other holders' signatures of them are on their way: a second's steps of a
small model. Of large states as many as `PINNED_BYTES_MAX` has room for, and two at least."""
SIGNATURES_PER_OFFER_MAX: Final = 512
"""Signatures in one offer: a majority of 1,000 holders, about 60 KiB."""
HALTED_S_MAX: Final = 30.0
"""How long the run stands still for one member that says it leaves: as long as a leave takes. After that it must have
been away before it is waited for again."""
REPAIRED_SHARE: Final = 0.05
"""The share of the run's microbatches that run again by one member's word, in the long run, beside `s_max` + 2 whole
steps at once: what a stage lacks when its only holder dies, and is asked for once more."""
RESTARTS_MAX: Final = 10.0
RESTARTS_PER_S: Final = 1 / 60
"""How often a member of our group may begin anew: so many times at once, and once a minute in the long run."""
SAVES_OF_ONE_MAX: Final = 4
"""Versions that one member may have us write down because it leaves, until it has been away; one is usual, and another
where it held experts that were at another version."""
KEEPING_SHARE: Final = 0.5
"""The share of time in which a peer fetches the copies that one member wants kept, in the long run."""
KEEPING_AT_ONCE_S: Final = 60.0
"""How long it may fetch one member's copies beyond that share: the last one before that member leaves follows on one by
the clock."""
KEEPING_S_MIN: Final = 1.0
"""What a copy counts at least, however small: it is written to disk and looked for there."""
PINNED_S_MAX: Final = 1800.0
"""How long a version is kept for who fetches it, however often they ask: 1.8 GB on a line of 1 MB/s."""
PINNED_VERSIONS_MAX: Final = 4
"""Versions that others may have had us keep at a time, of what we train and of what lies on our disk. Who asks for the
newest when there are so many gets the newest of these."""
PINNED_BYTES_MAX: Final = 2 * 1024**3
"""What these take together. One version is always kept, however large."""
REPLAYED_BYTES_MAX: Final = 1024**3
"""Reduced gradients that a holder keeps for a newcomer to replay; a newcomer that needs more fetches a newer state."""
REPLAYED_STEPS_MIN: Final = 16
"""A holder keeps at least so many reduced gradients, however large: a stage whose gradient is 400 MB steps every few
seconds, and its state takes a minute on a home line."""
LIGHT_STATE_S: Final = 60.0
"""A newcomer whose state comes within so many seconds waits for it; with a slower line it computes with weights first
(`../peer/light.py`). These come in a sixth of the time, and for less than this they are not worth coming beside it."""
