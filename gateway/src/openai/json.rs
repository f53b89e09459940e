//! JSON written straight into a buffer: a token is worth no tree.

use bytes::BytesMut;

/// For each ASCII byte, what stands behind the backslash; 0 for none, `u` for `\u00XX`.
const ESCAPES: [u8; 256] = escapes();

const fn escapes() -> [u8; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 0x20 {
        table[byte] = b'u';
        byte += 1;
    }
    table[b'\n' as usize] = b'n';
    table[b'\r' as usize] = b'r';
    table[b'\t' as usize] = b't';
    table[b'"' as usize] = b'"';
    table[b'\\' as usize] = b'\\';
    table
}

/// A string with its quotes.
pub fn string(out: &mut BytesMut, text: &str) {
    out.reserve(text.len() + 2);
    out.extend_from_slice(b"\"");
    let bytes = text.as_bytes();
    let mut from = 0;
    for (at, byte) in bytes.iter().enumerate() {
        let escape = ESCAPES[*byte as usize];
        if escape == 0 {
            continue;
        }
        out.extend_from_slice(&bytes[from..at]);
        out.extend_from_slice(&[b'\\', escape]);
        if escape == b'u' {
            let hex = |nibble: u8| b"0123456789abcdef"[nibble as usize];
            out.extend_from_slice(&[b'0', b'0', hex(byte >> 4), hex(byte & 15)]);
        }
        from = at + 1;
    }
    out.extend_from_slice(&bytes[from..]);
    out.extend_from_slice(b"\"");
}

/// A whole number.
pub fn integer(out: &mut BytesMut, value: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut rest = value;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// The least log-probability that is written; JSON has no infinity, and OpenAI writes this.
const LOGPROB_MIN: f32 = -9999.0;

/// A log-probability.
pub fn logprob(out: &mut BytesMut, value: f32) {
    let value = if value.is_nan() { LOGPROB_MIN } else { value.clamp(LOGPROB_MIN, 0.0) };
    out.extend_from_slice(value.to_string().as_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_reads_back(text in any::<String>(), number in any::<u64>(), log in any::<f32>()) {
            let mut out = BytesMut::new();
            string(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).expect("JSON"), text);
            out.clear();
            integer(&mut out, number);
            prop_assert_eq!(serde_json::from_slice::<u64>(&out).expect("JSON"), number);
            out.clear();
            logprob(&mut out, log);
            let back = serde_json::from_slice::<f32>(&out).expect("JSON");
            prop_assert!((LOGPROB_MIN..=0.0).contains(&back));
        }
    }
}
