//! What `images/build` made, and how it is best run on this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::Vm;

/// A machine whose KVM works boots in about a second.
const KVM_PROBE_TIMEOUT: Duration = Duration::from_secs(6);

/// Sectors that the boot sector reads behind itself, and where it writes how many; see `images/guest/boot.S`.
const BOOT_READ_SECTORS: usize = 1 + 7 + 8 + 16 + 32 + 127;
const BOOT_WRITE_SECTOR: usize = 2048;
const BOOT_WRITE_SECTORS: usize = 16;
const SECTOR: usize = 512;

/// The first QEMU whose emulated processors note every page that they write while the guest moves. Older ones take the
/// marks of written pages away without telling the processors' TLBs, so that later writes to those pages are missed and
/// guests go on with old pages among the new, whatever serves their disk (mended by QEMU's commit 03bfc2188f06).
const EMULATED_MOVES: (u32, u32) = (9, 0);

/// A file that `images/build` makes.
pub(super) fn image(name: &str) -> Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/out").join(name);
    path.canonicalize().with_context(|| format!("no {}: run images/build first", path.display()))
}

/// Which QEMU runs the guest: front-ends differ in what they send and when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Qemu {
    /// The one of the distribution's release.
    #[default]
    Stable,
    /// The newer one of the backports suite; not every release has one.
    Backports,
}

impl Qemu {
    fn dir(self) -> &'static str {
        match self {
            Self::Stable => "qemu",
            Self::Backports => "qemu-backports",
        }
    }

    /// The program, if the images have it.
    pub fn program(self) -> Result<PathBuf> {
        image(&format!("{}/qemu", self.dir()))
    }

    /// One that moves a guest without harm, or why there is none.
    pub fn for_moves() -> Result<Self> {
        if Accel::best() == Accel::Kvm {
            return Ok(Self::Stable);
        }
        let (major, minor) = EMULATED_MOVES;
        [Self::Stable, Self::Backports]
            .into_iter()
            .find(|qemu| qemu.version().is_ok_and(|version| version >= EMULATED_MOVES))
            .with_context(|| format!("no QEMU of version {major}.{minor} or newer: older ones lose written pages of emulated guests"))
    }

    /// Major and minor version.
    pub(super) fn version(self) -> Result<(u32, u32)> {
        let text = fs::read_to_string(image(&format!("{}/version", self.dir()))?)?;
        let number = text.split_whitespace().nth(3).context("no version number")?;
        let mut parts = number.split('.').map(|part| part.parse().unwrap_or(0));
        Ok((parts.next().unwrap_or(0), parts.next().unwrap_or(0)))
    }
}

/// How guest code is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// By the processor.
    Kvm,
    /// By translation: correct, and slow.
    Tcg,
}

impl Accel {
    /// KVM where a guest really boots with it (a device node alone says little inside a virtual machine), else TCG.
    pub fn best() -> Self {
        static BEST: OnceLock<Accel> = OnceLock::new();
        *BEST.get_or_init(|| match std::env::var("POLYPATH_ACCEL").as_deref() {
            Ok("kvm") => Self::Kvm,
            Ok("tcg") => Self::Tcg,
            _ => known_or_probed(),
        })
    }

    pub(super) fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}

/// The answer holds as long as this machine runs, so one test process probes for all.
fn known_or_probed() -> Accel {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Accel::Tcg;
    }
    let machine = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let note = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/out/accel");
    let known = fs::read_to_string(&note).unwrap_or_default();
    if let Some(answer) = known.strip_prefix(&machine) {
        return if answer == "kvm" { Accel::Kvm } else { Accel::Tcg };
    }
    let boots = Vm::new().accel(Accel::Kvm).boot_within(KVM_PROBE_TIMEOUT).is_ok();
    let _ = fs::write(&note, format!("{machine}{}", if boots { "kvm" } else { "tcg" }));
    if boots { Accel::Kvm } else { Accel::Tcg }
}

/// The next bytes of the sequence that the boot sector expects and writes.
fn sequence(value: &mut u32, sectors: usize) -> Vec<u8> {
    let mut next = || {
        *value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        value.to_le_bytes()
    };
    (0..sectors * SECTOR / 4).flat_map(|_| next()).collect()
}

/// Makes a disk of `bytes` that the firmware can boot: the boot sector and the data that it checks.
///
/// When all went well the guest's console shows [`boot_disk`]'s return value.
pub fn boot_disk(file: &Path, bytes: u64) -> Result<&'static str> {
    let mut content = fs::read(image("bootsector")?)?;
    content.extend(sequence(&mut 1, BOOT_READ_SECTORS));
    fs::write(file, content).and_then(|()| fs::File::options().write(true).open(file)?.set_len(bytes))?;
    Ok("boot sector: all sectors read and written as they should be")
}

/// Checks in the file that what the boot sector wrote is where it belongs.
pub fn check_boot_disk(file: &Path) -> Result<()> {
    let content = fs::read(file)?;
    let mut value = 1;
    sequence(&mut value, BOOT_READ_SECTORS);
    let written = &content[BOOT_WRITE_SECTOR * SECTOR..][..BOOT_WRITE_SECTORS * SECTOR];
    ensure!(written == sequence(&mut value, BOOT_WRITE_SECTORS), "the firmware's write is not in the file");
    Ok(())
}
