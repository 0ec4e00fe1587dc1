//! Base64, the one encoding that both a shell and a line-based channel take.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let index = (bits >> (18 - 6 * at) & 63) as usize;
            text.push(if at <= chunk.len() { ALPHABET[index].into() } else { '=' });
        }
    }
    text
}

/// Takes what it understands; a channel that was cut off yields what came before.
pub(super) fn decode(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut nr_bits) = (Vec::new(), 0u32, 0);
    for value in text.bytes().map_while(|c| ALPHABET.iter().position(|&a| a == c)) {
        bits = bits << 6 | u32::try_from(value).expect("below 64");
        nr_bits += 6;
        if nr_bits >= 8 {
            nr_bits -= 8;
            bytes.push(u8::try_from(bits >> nr_bits & 0xff).expect("masked"));
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_at_every_length_modulo_three() {
        for (plain, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(encode(plain.as_bytes()), coded);
            assert_eq!(decode(coded), plain.as_bytes());
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), all);
    }
}
