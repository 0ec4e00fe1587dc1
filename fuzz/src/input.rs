//! Choices out of the fuzzer's bytes. When they are used up, every choice is the first one: 0, or no.

use arbitrary::Unstructured;

/// Writing to a connection that was closed is an error and not the end, as in every program in Rust that has a `main`.
pub fn ignore_broken_pipes() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: no handler of this process is replaced, it has none for this signal.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    });
}

/// The bytes that are left.
pub struct Input<'a>(Unstructured<'a>);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u32) -> u32 {
        self.0.int_in_range(0..=bound - 1).unwrap_or(0)
    }

    /// The same as an index.
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(u32::try_from(bound).expect("few")) as usize
    }

    /// True once in `rarity` times, and only as long as there is input.
    pub fn rarely(&mut self, rarity: u32) -> bool {
        self.below(rarity) == rarity - 1
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    pub fn u8(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub fn u16(&mut self) -> u16 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    /// At most so many bytes.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let len = self.0.len().min(most);
        self.0.bytes(len).unwrap_or_default()
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }
}
