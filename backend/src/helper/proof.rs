//! What the helper asks of a path before it gives its descriptor away, whatever the asker says.

use std::collections::HashMap;
use std::path::{Path as StdPath, PathBuf};
use std::sync::{Mutex, PoisonError};

use polypath_paths::{FileKind, Identity, OpenOptions, Path, prove};

use crate::probe::read_block;

/// What is known of the disk when it is first served.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Bounds {
    /// Names that it was reached by, with what was found there.
    known: Vec<(PathBuf, Identity)>,
    first: Identity,
    kind: FileKind,
    size_bytes: u64,
    options: OpenOptions,
    /// Paths are not asked for a proof: they only have to be of the same kind, and not smaller.
    is_trusting: bool,
}

impl Bounds {
    /// The disk is what these paths, which were proved, lead to.
    pub(crate) fn new<'a>(
        paths: impl IntoIterator<Item = &'a Path>,
        options: OpenOptions,
        is_trusting: bool,
    ) -> Option<Self> {
        let mut paths = paths.into_iter().peekable();
        let first = *paths.peek()?;
        let (kind, size_bytes, first) =
            (first.limits().kind, first.limits().size_bytes, first.identity().clone());
        let known = paths.map(|path| (path.name().to_owned(), path.identity().clone())).collect();
        Some(Self { known, first, kind, size_bytes, options, is_trusting })
    }
}

/// Opens what is within these bounds.
#[derive(Debug)]
pub(super) struct Proof {
    bounds: Bounds,
    /// By names, what was found there first.
    known: Mutex<HashMap<PathBuf, Identity>>,
}

impl Proof {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { known: Mutex::new(bounds.known.iter().cloned().collect()), bounds }
    }

    /// Opens a path and has it proved.
    pub(super) fn open(
        &self,
        name: PathBuf,
        options: OpenOptions,
        size_bytes: u64,
        reference: Option<&StdPath>,
    ) -> Result<Path, String> {
        if options != self.bounds.options {
            return Err("not as it was configured to be opened".to_owned());
        }
        let path = Path::open(name, options, 1).map_err(|error| error.to_string())?;
        read_block(&path)?;
        self.check(&path, size_bytes, reference).map_err(|why| format!("refused: {why}"))?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(path.name().to_owned()).or_insert_with(|| path.identity().clone());
        Ok(path)
    }

    fn check(&self, path: &Path, size_bytes: u64, reference: Option<&StdPath>) -> Result<(), String> {
        if self.bounds.is_trusting {
            let limits = path.limits();
            let fits = limits.kind == self.bounds.kind && limits.size_bytes >= self.bounds.size_bytes;
            return fits.then_some(()).ok_or_else(|| {
                format!(
                    "the disk was at the start {:?} of {} bytes",
                    self.bounds.kind, self.bounds.size_bytes
                )
                .to_lowercase()
            });
        }
        let (own, is_known, by_name) = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let is_known = known.values().any(|identity| identity == path.identity());
            let named = |name: &StdPath| known.get_key_value(name).map(|(name, _)| name.clone());
            (known.get(path.name()).cloned(), is_known, reference.and_then(named))
        };
        let expected = match own {
            _ if is_known => path.identity().clone(),
            Some(own) => own,
            None => self.bounds.first.clone(),
        };
        // Opened only if it is needed: it may be on its way out.
        let reference = by_name.filter(|_| !is_known).and_then(|name| {
            let opened = Path::open(name, self.bounds.options, 1).ok()?;
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.values().any(|identity| identity == opened.identity()).then_some(opened)
        });
        prove(path, &expected, size_bytes, reference.as_ref()).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: OpenOptions = OpenOptions { read_only: false, direct: false };

    fn file(dir: &StdPath, name: &str, size_bytes: usize) -> PathBuf {
        let name = dir.join(name);
        std::fs::write(&name, vec![7; size_bytes]).unwrap();
        name
    }

    fn proof(of: &StdPath, is_trusting: bool) -> Proof {
        let path = Path::open(of.to_owned(), OPTIONS, 1).unwrap();
        Proof::new(Bounds::new([&path], OPTIONS, is_trusting).unwrap())
    }

    #[test]
    fn only_the_disk_is_opened_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, other) = (file(dir.path(), "disk", 8192), file(dir.path(), "other", 8192));
        let link = dir.path().join("link");
        std::fs::hard_link(&disk, &link).unwrap();
        let proof = proof(&disk, false);
        for name in [&disk, &link] {
            assert!(proof.open(name.clone(), OPTIONS, 8192, None).is_ok());
        }
        // Neither equal contents nor a size that the asker makes up, nor another path of the disk, help.
        for (size_bytes, reference) in [(8192, None), (0, None), (8192, Some(&*disk)), (8192, Some(&*other))]
        {
            let error = proof.open(other.clone(), OPTIONS, size_bytes, reference).unwrap_err();
            assert!(error.starts_with("refused: "), "{error}");
        }
        let error = proof.open("/etc/passwd".into(), OPTIONS, 0, None).unwrap_err();
        assert!(error.starts_with("refused: "), "{error}");
        let read_only = OpenOptions { read_only: true, ..OPTIONS };
        assert!(proof.open(disk, read_only, 8192, None).is_err());
    }

    #[test]
    fn without_proofs_it_has_to_look_like_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let disk = file(dir.path(), "disk", 8192);
        let proof = proof(&disk, true);
        assert!(proof.open(file(dir.path(), "same", 8192), OPTIONS, 8192, None).is_ok());
        for name in [file(dir.path(), "small", 4096), "null:8192".into()] {
            assert!(proof.open(name, OPTIONS, 4096, None).unwrap_err().starts_with("refused: "));
        }
    }
}
