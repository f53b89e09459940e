//! The one table of limits. Everything that bounds bytes, frames, streams or waits on the wire reads it.
//!
//! Sizes are bytes. [`check`] states how the rows depend on each other; a node refuses to start when they
//! contradict each other, and the first test of this file does the same.

use std::time::Duration;

/// Payload of one frame: a data frame, or the body of an open or accept. A gateway's body limit stays below.
pub const FRAME_PAYLOAD_MAX: usize = 8 << 20;
/// MessagePack header of one frame (context, fault, hello).
pub const FRAME_HEADER_MAX: usize = 64 << 10;
/// Everything after the length word of one frame.
pub const FRAME_MAX: usize = FRAME_PAYLOAD_MAX + FRAME_HEADER_MAX + 16;
/// Payloads up to this size are copied out of the read buffer, so that a small frame never keeps a large
/// buffer alive; larger ones are slices of it.
pub const COPY_BELOW: usize = 4 << 10;
/// Frames that may be under way in one direction of a stream before its reader must have taken one.
pub const STREAM_WINDOW_FRAMES: usize = 64;
/// Bytes that may be under way in one direction of a stream. A frame takes at least a 64th of it and at most three
/// quarters, so that one larger frame may pass when at most a quarter lies unread; readers give back in quarters.
pub const STREAM_WINDOW_BYTES: usize = 1 << 20;
/// Open streams on one link, both directions.
pub const STREAMS_PER_LINK_MAX: usize = 16_384;
/// Handlers running on one node.
pub const HANDLERS_MAX: usize = 65_536;
/// Payload bytes that wait for the writer of one link; senders wait for room.
pub const LINK_QUEUE_BYTES: usize = 16 << 20;
/// Bytes of answers and other control frames that wait for the writer of one link. A reply that does not fit is
/// answered as overloaded; a peer that makes anything else not fit is cut off.
pub const LINK_CONTROL_BYTES: usize = 32 << 20;
/// Payload bytes that lie unread in all streams of one link. Beyond it the stream that holds the most is cut.
pub const LINK_UNREAD_BYTES: usize = 128 << 20;
/// What one stream costs a link besides its payloads, and what one connection costs besides its streams, at most.
pub const STREAM_OVERHEAD: usize = 2 << 10;
/// Buffers of one connection: a partly received frame, the read buffers, two write buffers, and those of TLS.
pub const LINK_OVERHEAD: usize = FRAME_MAX + 2 * READ_BUFFER + 4 * WRITE_COALESCE + (256 << 10);
/// All that one link holds at most, whatever its peer and its readers do: 224 MiB.
pub const LINK_BYTES_MAX: usize = 224 << 20;
/// The writer puts together what waits up to this size in one write.
pub const WRITE_COALESCE: usize = 64 << 10;
/// Capacity of a connection's read buffer.
pub const READ_BUFFER: usize = 256 << 10;
/// Connections that are in their TLS handshake or hello at one time.
pub const HANDSHAKES_MAX: usize = 128;
/// Longest TLS handshake, and longest wait for a hello.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(5);
/// A handshake younger than this never makes way for a newer connection.
pub const HANDSHAKE_GRACE: Duration = Duration::from_secs(1);
/// Longest TCP connect: time for several attempts, each with lost SYNs. A dial to a node that is declared down meanwhile ends
/// at once.
pub const DIAL_TIME_MAX: Duration = Duration::from_secs(10);
/// How long unacknowledged data may stay unacknowledged before the kernel breaks a connection.
pub const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long streams may go on over a link whose key was removed from the cluster.
pub const KEY_REMOVED_GRACE: Duration = Duration::from_secs(60);
/// Longest gap between frames on the side that opened a request stream, unless set otherwise.
pub const STREAM_INACTIVITY: Duration = Duration::from_secs(30);

/// Checks that the table does not contradict itself.
pub fn check() -> Result<(), String> {
    let rules = [
        (FRAME_PAYLOAD_MAX < FRAME_MAX, "a frame must hold its largest payload"),
        (FRAME_MAX <= u32::MAX as usize, "a frame's length must fit its length word"),
        (FRAME_PAYLOAD_MAX <= LINK_QUEUE_BYTES, "the largest payload must fit the writer's queue"),
        (COPY_BELOW < WRITE_COALESCE, "copied payloads must fit one coalesced write"),
        (WRITE_COALESCE <= READ_BUFFER, "one coalesced write should fit one read"),
        (STREAM_WINDOW_FRAMES >= 4, "credits come back in quarters of a window"),
        (STREAM_WINDOW_BYTES.is_multiple_of(4 * STREAM_WINDOW_FRAMES), "a window must divide into its frames"),
        (STREAM_WINDOW_BYTES <= u32::MAX as usize, "a window must fit its field in the hello"),
        (FRAME_MAX <= LINK_CONTROL_BYTES / 2, "the largest reply must fit the control queue"),
        (2 * FRAME_PAYLOAD_MAX + STREAM_WINDOW_BYTES <= LINK_UNREAD_BYTES, "a few full streams must fit a link"),
        (
            LINK_QUEUE_BYTES
                + LINK_CONTROL_BYTES
                + LINK_UNREAD_BYTES
                + LINK_OVERHEAD
                + STREAMS_PER_LINK_MAX * STREAM_OVERHEAD
                <= LINK_BYTES_MAX,
            "the parts of a link must fit its total",
        ),
        (STREAMS_PER_LINK_MAX <= HANDLERS_MAX, "one link's streams must find handlers"),
        (HANDSHAKE_GRACE < HANDSHAKE_TIME_MAX, "a silent connection must make way before its time is over"),
        (DIAL_TIME_MAX < HANDSHAKE_TIME_MAX + DIAL_TIME_MAX, "times must be positive"),
    ];
    rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, rule)| Err((*rule).to_owned()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_limits_do_not_contradict_each_other() {
        assert_eq!(super::check(), Ok(()));
    }
}
