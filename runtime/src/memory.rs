//! Checks that the memory a plan needs is available to this process, before anything is allocated.

use crate::RunError;
use frit_ir::plan::{Arena, DeviceType, Plan};
use std::path::Path;

/// The tightest memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes remaining under the limit.
    pub bytes: u64,
    /// The kind of limit.
    pub of: &'static str,
}

/// Memory that this process may still allocate; `None` where the system does not report it.
pub fn available() -> Option<Limit> {
    least(&|path| std::fs::read_to_string(path).ok())
}

/// Bytes of host memory for the arenas of this many ranks of a plan.
pub fn needed(plan: &Plan, ranks: usize) -> u64 {
    let arenas: &[Arena] = match plan.target.device == DeviceType::Cuda {
        true => &[Arena::Host],
        false => &[Arena::Persistent, Arena::Workspace, Arena::Host],
    };
    let rank: usize = arenas.iter().map(|arena| plan.arena_bytes(*arena)).sum();
    rank as u64 * ranks as u64
}

/// Checks that the arenas of all ranks fit, for a plan and its evaluation.
///
/// # Errors
/// If they do not fit: both sizes, and what to do.
pub(crate) fn check(plans: &[&Plan], ranks: usize) -> Result<(), RunError> {
    let Some(limit) = available() else { return Ok(()) };
    let needed = plans.iter().map(|plan| needed(plan, ranks)).sum();
    if needed <= limit.bytes {
        return Ok(());
    }
    Err(RunError::Memory { needed, ranks, available: limit.bytes, of: limit.of })
}

/// Resident bytes of this process; `None` where the system does not report them.
pub(crate) fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Formats a number of bytes.
pub(crate) fn size(bytes: u64) -> String {
    let (mib, gib) = ((1_u64 << 20) as f64, (1_u64 << 30) as f64);
    match bytes as f64 {
        b if b < gib => format!("{:.1} MiB", b / mib),
        b => format!("{:.1} GiB", b / gib),
    }
}

/// The tightest of all limits, read from the files of a Linux system.
fn least(read: &dyn Fn(&str) -> Option<String>) -> Option<Limit> {
    let limits = [machine(read), container(read), address_space(read)];
    limits.into_iter().flatten().min_by_key(|limit| limit.bytes)
}

/// Memory available without evicting other programs, plus swap.
fn machine(read: &dyn Fn(&str) -> Option<String>) -> Option<Limit> {
    let text = read("/proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    let kib = field("MemAvailable")? + field("SwapFree").unwrap_or(0);
    Some(Limit { bytes: kib << 10, of: "free on this machine" })
}

/// Memory remaining under the limits of the process's control group and its ancestors, which containers and schedulers
/// set.
fn container(read: &dyn Fn(&str) -> Option<String>) -> Option<Limit> {
    let text = read("/proc/self/cgroup")?;
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let names = match controllers {
            "" => ("/sys/fs/cgroup", ["memory.max", "memory.current"], "inactive_file "),
            list if list.split(',').any(|c| c == "memory") => (
                "/sys/fs/cgroup/memory",
                ["memory.limit_in_bytes", "memory.usage_in_bytes"],
                "total_inactive_file ",
            ),
            _ => return None,
        };
        Some((names, path.to_string()))
    };
    let left = |folder: &str, [max, used]: [&str; 2], cached: &str| {
        let number = |name: &str| read(&format!("{folder}/{name}"))?.trim().parse::<u64>().ok();
        // The system reclaims inactive file pages.
        let stat = read(&format!("{folder}/memory.stat")).unwrap_or_default();
        let cached = stat.lines().find_map(|l| l.strip_prefix(cached)?.trim().parse().ok());
        let used = number(used)?.saturating_sub(cached.unwrap_or(0));
        Some(number(max)?.saturating_sub(used))
    };
    let mut bytes: Option<u64> = None;
    for ((root, files, cached), path) in text.lines().filter_map(group) {
        // In a container the path may be the host's.
        for folder in Path::new(&path).ancestors() {
            let folder = folder.to_string_lossy();
            let found = left(&format!("{root}{}", folder.trim_end_matches('/')), files, cached);
            bytes = [bytes, found].into_iter().flatten().min();
        }
    }
    bytes.map(|bytes| Limit { bytes, of: "left by the limit of its container or job (cgroup)" })
}

/// Memory remaining under `ulimit -v`.
fn address_space(read: &dyn Fn(&str) -> Option<String>) -> Option<Limit> {
    let limits = read("/proc/self/limits")?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let status = read("/proc/self/status")?;
    let used = status.lines().find_map(|l| l.strip_prefix("VmSize:"))?;
    let used: u64 = used.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let bytes = limit.saturating_sub(used << 10);
    Some(Limit { bytes, of: "left by the limit of its address space (ulimit -v)" })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tightest limit of a system with these files.
    fn found(files: &[(&str, &str)]) -> Option<(u64, &'static str)> {
        let read =
            |path: &str| files.iter().find(|(p, _)| *p == path).map(|(_, text)| text.to_string());
        least(&read).map(|l| (l.bytes, l.of.split_whitespace().last().expect("words")))
    }

    #[test]
    fn the_tightest_limit_counts() {
        assert_eq!(found(&[]), None);
        let machine =
            ("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   8000 kB\nSwapFree: 2 kB\n");
        assert_eq!(found(&[machine]), Some((8002 << 10, "machine")));
        let status = ("/proc/self/status", "VmPeak: 1 kB\nVmSize:\t   1000 kB\n");
        let free = ("/proc/self/limits", "Max address space  unlimited  unlimited  bytes\n");
        assert_eq!(found(&[machine, status, free]), Some((8002 << 10, "machine")));
        let tight = ("/proc/self/limits", "Max address space  2048000  unlimited  bytes\n");
        assert_eq!(found(&[machine, status, tight]), Some((1000 << 10, "-v)")));
        // The job's group has no limit, its parent has.
        let v2 = [
            machine,
            ("/proc/self/cgroup", "0::/slice/job\n"),
            ("/sys/fs/cgroup/slice/job/memory.max", "max\n"),
            ("/sys/fs/cgroup/slice/job/memory.current", "5000\n"),
            ("/sys/fs/cgroup/slice/memory.max", "9000\n"),
            ("/sys/fs/cgroup/slice/memory.current", "6000\n"),
            ("/sys/fs/cgroup/slice/memory.stat", "anon 1\ninactive_file 1000\n"),
        ];
        assert_eq!(found(&v2), Some((4000, "(cgroup)")));
        let v1 = [
            ("/proc/self/cgroup", "9:cpu:/x\n4:memory:/box\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "8000\n"),
        ];
        assert_eq!(found(&v1), Some((0, "(cgroup)")));
    }
}
