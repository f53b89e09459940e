//! Bytes of a server-sent event stream to the data of its events. Pure.
//!
//! Called by `call` with what the socket gave. Comments and other fields are passed over. Bounds: [`EVENT_MAX`] bytes an event.

/// Bytes of one event; a server's step says far less.
pub(super) const EVENT_MAX: usize = 4 << 20;

/// An event longer than anything a server sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooLong;

/// Cuts a stream into events.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// A line that has not ended.
    line: Vec<u8>,
    /// Data of an event that has not ended.
    data: Vec<u8>,
    /// The event has data, perhaps of no bytes.
    any: bool,
}

impl Events {
    /// Takes bytes; appends the data of every event that ends in them.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut Vec<Vec<u8>>) -> Result<(), TooLong> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.len() + self.data.len() > EVENT_MAX {
                return Err(TooLong);
            }
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.end_line(&line, out);
            }
        }
        Ok(())
    }

    fn end_line(&mut self, line: &[u8], out: &mut Vec<Vec<u8>>) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            if std::mem::take(&mut self.any) {
                out.push(std::mem::take(&mut self.data));
            }
            return;
        }
        let Some(data) = line.strip_prefix(b"data:") else { return };
        if std::mem::replace(&mut self.any, true) {
            self.data.push(b'\n');
        }
        self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(parts: &[&[u8]]) -> Vec<String> {
        let (mut events, mut out) = (Events::default(), Vec::new());
        for part in parts {
            events.push(part, &mut out).expect("short");
        }
        out.into_iter().map(|data| String::from_utf8(data).expect("text")).collect()
    }

    #[test]
    fn comments_and_other_fields_are_passed_over() {
        let stream = b": ping\r\n\r\nevent: x\ndata: {\"a\":1}\r\n\r\nid: 3\ndata:[DONE]\n\ndata: unfinished\n";
        assert_eq!(read(&[stream]), ["{\"a\":1}", "[DONE]"]);
        assert_eq!(read(&[b"data: a\ndata: b\n\n"]), ["a\nb"]);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let (mut events, mut out) = (Events::default(), Vec::new());
        assert_eq!(events.push(&vec![b'x'; EVENT_MAX + 1], &mut out), Err(TooLong));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_where_the_stream_is_cut(
            texts in proptest::collection::vec("[a-z\u{e9}{}:]{0,12}", 0..6), cuts in proptest::collection::vec(1usize..9, 0..40)
        ) {
            let stream: String = texts.iter().map(|text| format!("data: {text}\r\n: c\n\n")).collect();
            let (mut rest, mut parts) = (stream.as_bytes(), Vec::new());
            for cut in cuts {
                let (part, left) = rest.split_at(cut.min(rest.len()));
                parts.push(part);
                rest = left;
            }
            parts.push(rest);
            prop_assert_eq!(read(&parts), texts);
        }
    }
}
