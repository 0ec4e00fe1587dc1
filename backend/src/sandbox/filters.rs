//! The filters, made of the calls: what may be called by number, and what only in a certain way.

use std::collections::BTreeMap;
use std::ffi::c_long;

use libc::*;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use super::{Kind, calls};

/// `PR_SET_VMA` (prctl(2)): names for anonymous memory, which newer libraries give.
const SET_VMA: u64 = 0x5356_4d41;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Made<T> = Result<T, BackendError>;

/// One for each kind of thread, and what holds for all of them.
#[derive(Debug)]
pub(super) struct Filters {
    /// Answered with EACCES.
    files: BpfProgram,
    /// Answered with ENOSYS: the library then uses calls whose arguments can be seen.
    unseen: BpfProgram,
    kinds: Vec<(Kind, BpfProgram)>,
}

/// Whether a word of a call is `value`, of those bits that `mask` has.
fn has(argument: u8, mask: u64, value: u64) -> Made<SeccompRule> {
    let op = SeccompCmpOp::MaskedEq(mask);
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Qword, op, value)?])
}

/// Whether an `int` of a call is this.
fn is(argument: u8, value: u64) -> Made<SeccompRule> {
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?])
}

fn number(value: c_int) -> u64 {
    value.unsigned_abs().into()
}

fn allow(rules: &mut Rules, calls: &[c_long]) {
    for call in calls {
        rules.insert(*call, Vec::new());
    }
}

/// What begins threads, and lets them confine themselves. No processes: they would not be threads.
fn allow_threads(rules: &mut Rules) -> Made<()> {
    let thread = number(CLONE_THREAD);
    rules.insert(SYS_clone, vec![has(0, thread, thread)?]);
    allow(rules, &[SYS_clone3, SYS_seccomp]);
    rules.entry(SYS_prctl).or_default().push(is(0, number(PR_SET_NO_NEW_PRIVS))?);
    Ok(())
}

fn every() -> Made<Rules> {
    let mut rules = Rules::new();
    allow(&mut rules, calls::EVERY);
    allow(&mut rules, calls::WAITS[1]);
    // What is refused by the other filters is no violation here.
    allow(&mut rules, calls::FILES);
    let not_executable = || has(2, number(PROT_EXEC), 0);
    rules.insert(SYS_mmap, vec![not_executable()?]);
    rules.insert(SYS_mprotect, vec![not_executable()?]);
    // abort(3), and nobody else's end.
    rules.insert(SYS_tgkill, vec![is(0, std::process::id().into())?]);
    #[cfg(target_env = "musl")]
    allow(&mut rules, &[SYS_tkill]);
    let names = [number(PR_SET_NAME), number(PR_GET_NAME), SET_VMA];
    rules.insert(SYS_prctl, names.into_iter().map(|name| is(0, name)).collect::<Made<_>>()?);
    // Debug builds of the standard library's types ask whether a descriptor that they close is open.
    rules.insert(SYS_fcntl, vec![is(1, number(F_GETFD))?]);
    // To who is connected. The handler of signals does it, on whichever thread they come.
    rules.insert(SYS_sendto, vec![has(4, u64::MAX, 0)?]);
    Ok(rules)
}

fn rules_of(kind: Kind) -> Made<Rules> {
    let mut rules = every()?;
    let is_control = kind == Kind::Control;
    if is_control || kind == Kind::Probe {
        allow(&mut rules, calls::PROBE);
    }
    if is_control || kind == Kind::Reload {
        allow(&mut rules, calls::RELOAD);
    }
    if is_control || kind == Kind::Metrics {
        allow(&mut rules, calls::METRICS);
        allow_threads(&mut rules)?;
    }
    if is_control || kind == Kind::Session || kind == Kind::Worker {
        allow(&mut rules, calls::WORKER);
        // Whether an eventfd blocks, and its own priority.
        rules.insert(SYS_fcntl, vec![is(1, number(F_GETFL))?, is(1, number(F_GETFD))?]);
        rules.insert(SYS_setpriority, vec![is(1, 0)?]);
    }
    if is_control || kind == Kind::Session {
        allow(&mut rules, calls::SESSION);
        // Whether a socket blocks, and whether it outlives an exec.
        rules.insert(SYS_ioctl, vec![is(1, FIONBIO)?, is(1, FIOCLEX)?]);
        if !is_control {
            allow_threads(&mut rules)?;
        }
    }
    if is_control {
        allow(&mut rules, calls::CONTROL);
        allow(&mut rules, calls::WAITS[0]);
    }
    Ok(rules)
}

fn compile(rules: Rules, otherwise: SeccompAction, matching: SeccompAction) -> Made<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, otherwise, matching, arch)?.try_into()
}

impl Filters {
    pub(super) fn new() -> Made<Self> {
        let mut files = Rules::new();
        allow(&mut files, calls::FILES);
        // Asking about what is open is no question about a file's name.
        files.insert(SYS_newfstatat, vec![has(3, number(AT_EMPTY_PATH), 0)?]);
        files.insert(SYS_statx, vec![has(2, number(AT_EMPTY_PATH), 0)?]);
        let unseen = Rules::from([(SYS_clone3, Vec::new())]);
        let refuse = |rules, errno: c_int| {
            compile(rules, SeccompAction::Allow, SeccompAction::Errno(errno.unsigned_abs()))
        };
        let kinds = Kind::ALL
            .map(|kind| Ok((kind, compile(rules_of(kind)?, SeccompAction::Trap, SeccompAction::Allow)?)));
        Ok(Self {
            files: refuse(files, EACCES)?,
            unseen: refuse(unseen, ENOSYS)?,
            kinds: kinds.into_iter().collect::<Made<_>>()?,
        })
    }

    /// What holds for every thread, for this one and those that it begins.
    pub(super) fn enter(&self) -> seccompiler::Result<()> {
        seccompiler::apply_filter(&self.files)?;
        seccompiler::apply_filter(&self.unseen)
    }

    /// What holds for this kind, for this thread and those that it begins.
    pub(super) fn apply(&self, kind: Kind) -> seccompiler::Result<()> {
        match self.kinds.iter().find(|(known, _)| *known == kind) {
            Some((_, filter)) => seccompiler::apply_filter(filter),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What docs/sandbox.md says.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn as_many_calls_are_left_as_is_said() {
        let nr = |kind| rules_of(kind).unwrap().len() - calls::FILES.len();
        let all = Kind::ALL.map(nr);
        assert_eq!((all.iter().min(), all.iter().max(), nr(Kind::Worker)), (Some(&43), Some(&75), 49));
    }
}
