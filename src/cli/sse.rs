//! Cuts a stream of bytes into server-sent events. Pure.
//!
//! Called by `chat`. Any split of the bytes gives the same events.

/// Collects bytes and gives out the `data:` of whole events.
#[derive(Debug, Default)]
pub(super) struct EventLines {
    pending: Vec<u8>,
}

impl EventLines {
    /// Adds bytes; returns the data of every event that they complete, in order.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.pending.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            if let Some(data) = line.trim_end().strip_prefix("data:") {
                events.push(data.trim_start().to_owned());
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_split_gives_the_same_events() {
        let bytes = ": hello\n\ndata: {\"a\":\"ä\"}\r\n\r\ndata: [DONE]\n\n".as_bytes();
        for cut in 0..bytes.len() {
            let mut lines = EventLines::default();
            let mut events = lines.push(&bytes[..cut]);
            events.extend(lines.push(&bytes[cut..]));
            assert_eq!(events, ["{\"a\":\"ä\"}", "[DONE]"], "cut at {cut}");
        }
    }
}
