//! Who this process is among the processes of a job, as launchers tell it: `torchrun --no-python` by its own
//! variables, `mpirun` and `srun` by theirs.

/// One process of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This process.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// This process among those of its machine.
    pub local_rank: usize,
    /// Where rank 0 listens: host and port; needed if there are several processes.
    pub master: Option<(String, u16)>,
}

/// Names of rank, number of processes and local rank: the usual ones, Open MPI's, Slurm's.
const NAMES: [[&str; 3]; 3] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];

impl Launch {
    /// Reads the process's environment. Without any of the variables it is the only process.
    ///
    /// # Errors
    /// What is missing or is no number.
    pub fn from_environment() -> Result<Launch, String> {
        Launch::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads variables.
    ///
    /// # Errors
    /// What is missing or is no number.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Launch, String> {
        let number = |name: &str| -> Result<Option<usize>, String> {
            let Some(text) = variable(name) else { return Ok(None) };
            let parsed = text.trim().parse();
            parsed.map(Some).map_err(|_| format!("{name}={text} is not a number"))
        };
        let Some(names) = NAMES.iter().find(|names| variable(names[1]).is_some()) else {
            return Ok(Launch { rank: 0, world_size: 1, local_rank: 0, master: None });
        };
        let world_size = number(names[1])?.unwrap_or(1);
        let rank = match number(names[0])? {
            Some(rank) => rank,
            None if world_size == 1 => 0,
            None => return Err(format!("{}={world_size} is set, but not {}", names[1], names[0])),
        };
        if rank >= world_size {
            return Err(format!("{}={rank} is not below {}={world_size}", names[0], names[1]));
        }
        let local_rank = match number(names[2])? {
            Some(local) => local,
            None if world_size == 1 => 0,
            None => return Err(format!("{}={world_size} is set, but not {}", names[1], names[2])),
        };
        let master = match (variable("MASTER_ADDR"), number("MASTER_PORT")?) {
            (Some(host), Some(port)) => Some((host, listening_port(port, &variable)?)),
            _ if world_size == 1 => None,
            _ => {
                let what =
                    "several processes need MASTER_ADDR and MASTER_PORT, where rank 0 listens";
                return Err(what.into());
            }
        };
        Ok(Launch { rank, world_size, local_rank, master })
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
    fn launchers_say_who_a_process_is() {
        assert_eq!(launch(&[]), Ok(Launch { rank: 0, world_size: 1, local_rank: 0, master: None }));
        let master = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        let usual = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];
        let expected = |port| Launch {
            rank: 3,
            world_size: 4,
            local_rank: 1,
            master: Some(("node0".into(), port)),
        };
        assert_eq!(launch(&[&usual[..], &master].concat()), Ok(expected(29500)));
        let torchrun = [("TORCHELASTIC_USE_AGENT_STORE", "True")];
        assert_eq!(launch(&[&usual[..], &master, &torchrun].concat()), Ok(expected(29501)));
        let slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "1")];
        assert_eq!(launch(&[&slurm[..], &master].concat()), Ok(expected(29500)));
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
