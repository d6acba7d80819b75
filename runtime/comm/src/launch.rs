//! The rank of this process, read from the environment set by `torchrun --no-python`, `mpirun` or `srun`.

use crate::CommError;
use std::time::Duration;

/// How long ranks wait for each other unless [`TIMEOUT_VARIABLE`] says otherwise.
const TIMEOUT: Duration = Duration::from_secs(600);
/// The variable with the number of seconds that ranks wait for each other.
pub const TIMEOUT_VARIABLE: &str = "FRIT_TIMEOUT";

/// How long ranks wait for each other.
///
/// # Errors
/// If the variable is not a number of seconds.
pub fn timeout_from_environment() -> Result<Duration, CommError> {
    Ok(timeout(std::env::var(TIMEOUT_VARIABLE).ok())?)
}

fn timeout(seconds: Option<String>) -> Result<Duration, String> {
    let Some(text) = seconds else { return Ok(TIMEOUT) };
    match text.trim().parse::<u64>() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err(format!("{TIMEOUT_VARIABLE}={text} is not a number of seconds")),
    }
}

/// One process of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Index of this process on its machine, if known.
    pub local_rank: Option<usize>,
    /// Number of processes on this machine, if known.
    pub local_size: Option<usize>,
    /// Where rank 0 listens: host and port; needed if there are several processes that MPI does not connect.
    pub master: Option<(String, u16)>,
    /// Whether Open MPI's `mpirun` started it.
    pub by_mpirun: bool,
}

/// Open MPI's names of rank, number of processes and local rank.
const OPEN_MPI: [&str; 3] =
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"];
/// The number of processes on this machine, beside each of [`NAMES`].
const LOCAL_SIZES: [&str; 3] =
    ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"];
/// All names: the usual ones, Open MPI's, Slurm's.
const NAMES: [[&str; 3]; 3] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    OPEN_MPI,
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];

impl Launch {
    /// Checks that there is one process for every rank of the plan.
    ///
    /// # Errors
    /// The number of processes, and how to start as many as needed.
    pub fn expect_ranks(&self, world_size: usize) -> Result<(), CommError> {
        if self.world_size == world_size {
            return Ok(());
        }
        let found = match self.world_size {
            1 => "1 process was".to_string(),
            n => format!("{n} processes were"),
        };
        Err(CommError::from(format!(
            "the plan is for {world_size} ranks, and {found} started; start one for each rank, as in \
             `torchrun --no-python --nproc-per-node {world_size} frit run …`"
        )))
    }

    /// Number of a plan's ranks that share the memory of this machine, as far as known.
    pub fn ranks_here(&self, world_size: usize) -> usize {
        if self.world_size == 1 { world_size } else { self.local_size.unwrap_or(1).max(1) }
    }

    /// Index of this process among those that share this many devices.
    pub fn local_rank_of(&self, n_devices: usize) -> usize {
        let local_size = self.local_size.unwrap_or(usize::MAX).max(1);
        self.local_rank.unwrap_or_else(|| self.rank % local_size % n_devices.max(1))
    }

    /// Reads the process's environment. Without any of the variables it is the only process.
    ///
    /// # Errors
    /// What is missing or is not a number.
    pub fn from_environment() -> Result<Launch, CommError> {
        Ok(Launch::from_variables(|name| std::env::var(name).ok())?)
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Launch, String> {
        let number = |name: &str| -> Result<Option<usize>, String> {
            let Some(text) = variable(name) else { return Ok(None) };
            let parsed = text.trim().parse();
            parsed.map(Some).map_err(|_| format!("{name}={text} is not a number"))
        };
        let Some(launcher) = NAMES.iter().position(|names| variable(names[1]).is_some()) else {
            return Ok(Launch {
                rank: 0,
                world_size: 1,
                local_rank: None,
                local_size: None,
                master: None,
                by_mpirun: false,
            });
        };
        let names = NAMES[launcher];
        let by_mpirun = names == OPEN_MPI;
        let world_size = number(names[1])?.unwrap_or(1);
        let rank = match number(names[0])? {
            Some(rank) => rank,
            None if world_size == 1 => 0,
            None => return Err(format!("{}={world_size} is set, but not {}", names[1], names[0])),
        };
        if rank >= world_size {
            return Err(format!("{}={rank} is not below {}={world_size}", names[0], names[1]));
        }
        let local_rank = number(names[2])?;
        // Slurm writes `4(x2)` where nodes differ, which does not identify this one.
        let local_size = variable(LOCAL_SIZES[launcher]).and_then(|n| n.trim().parse().ok());
        let master = match (variable("MASTER_ADDR"), number("MASTER_PORT")?) {
            (Some(host), Some(port)) => Some((host, listening_port(port, &variable)?)),
            _ if world_size == 1 || (cfg!(feature = "mpi") && by_mpirun) => None,
            _ => {
                let what =
                    "several processes need MASTER_ADDR and MASTER_PORT, where rank 0 listens";
                return Err(what.into());
            }
        };
        Ok(Launch { rank, world_size, local_rank, local_size, master, by_mpirun })
    }
}

/// `torchrun`'s own store listens at `MASTER_PORT`; then the next port is used.
fn listening_port(port: usize, variable: impl Fn(&str) -> Option<String>) -> Result<u16, String> {
    let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True");
    let port = port + usize::from(taken);
    port.try_into().map_err(|_| format!("MASTER_PORT={port} is not a port"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Launch, String> {
        let find =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Launch::from_variables(find)
    }

    #[test]
    fn the_timeout_is_a_number_of_seconds() {
        assert_eq!(timeout(None), Ok(TIMEOUT));
        assert_eq!(timeout(Some("30".into())), Ok(Duration::from_secs(30)));
        for wrong in ["0", "-1", "soon"] {
            assert!(timeout(Some(wrong.into())).unwrap_err().contains(TIMEOUT_VARIABLE));
        }
    }

    #[test]
    fn launchers_say_who_a_process_is() {
        let alone = Launch {
            rank: 0,
            world_size: 1,
            local_rank: None,
            local_size: None,
            master: None,
            by_mpirun: false,
        };
        assert_eq!(launch(&[]), Ok(alone.clone()));
        assert_eq!((alone.local_rank_of(8), alone.ranks_here(4)), (0, 4));
        let master = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        let usual = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];
        let expected = |port| Launch {
            rank: 3,
            world_size: 4,
            local_rank: Some(1),
            local_size: None,
            master: Some(("node0".into(), port)),
            by_mpirun: false,
        };
        assert_eq!(launch(&[&usual[..], &master].concat()), Ok(expected(29500)));
        let torchrun = [("TORCHELASTIC_USE_AGENT_STORE", "True")];
        assert_eq!(launch(&[&usual[..], &master, &torchrun].concat()), Ok(expected(29501)));
        let slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "1")];
        assert_eq!(launch(&[&slurm[..], &master].concat()), Ok(expected(29500)));
        let mpi = OPEN_MPI.into_iter().zip(["3", "4", "1"]);
        let found = launch(&mpi.chain(master).collect::<Vec<_>>());
        assert_eq!(found, Ok(Launch { by_mpirun: true, ..expected(29500) }));
    }

    #[test]
    fn without_a_local_rank_processes_take_devices_in_turn() {
        let four = [("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        let of = |rank: &'static str, more: &[(&'static str, &'static str)]| {
            launch(&[&four[..], &[("RANK", rank)], more].concat()).unwrap()
        };
        assert_eq!(of("3", &[]).local_rank_of(2), 1);
        assert_eq!(of("3", &[("LOCAL_WORLD_SIZE", "2")]).local_rank_of(8), 1);
        assert_eq!(of("3", &[("LOCAL_RANK", "0")]).local_rank_of(8), 0);
        assert_eq!(of("3", &[("LOCAL_WORLD_SIZE", "2")]).ranks_here(4), 2);
        assert_eq!(of("3", &[]).ranks_here(4), 1);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let error = |variables: &[(&str, &str)]| launch(variables).unwrap_err();
        assert!(error(&[("WORLD_SIZE", "2")]).contains("but not RANK"));
        assert!(error(&[("WORLD_SIZE", "two")]).contains("WORLD_SIZE=two is not a number"));
        let two = [("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
        assert!(error(&[&two[..], &[("RANK", "2")]].concat()).contains("RANK=2 is not below"));
        assert!(error(&[&two[..], &[("RANK", "1")]].concat()).contains("MASTER_ADDR"));
    }
}
