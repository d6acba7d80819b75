//! Authentication of the processes of a job by a shared secret.
//!
//! Challenge and response: each side sends 32 random bytes and the HMAC-SHA256 of both sides' bytes under the secret, so
//! neither the secret nor anything replayable is sent. Later traffic is neither encrypted nor signed: the network between the
//! machines must be trusted with the training data.
//!
//! The secret is [`SECRET_VARIABLE`], the same on every rank; or read from [`FILE_VARIABLE`], a path visible to all
//! ranks that rank 0 rewrites; or, for ranks of one machine, from a file in a directory that only their user can read.

use super::launch::Launch;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The variable with the secret.
pub const SECRET_VARIABLE: &str = "FRIT_SECRET";
/// The variable with the path of the secret's file.
pub const FILE_VARIABLE: &str = "FRIT_SECRET_FILE";
/// Minimum bytes of a secret: a shorter one could be guessed.
const SHORTEST: usize = 16;
/// Bytes of a challenge, and of a proof.
pub(super) const PROOF: usize = 32;

/// The secret that both sides of a connection know.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

/// Which side of a connection proves that it knows the secret.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Listens,
    Connects,
}

impl Secret {
    /// A new secret.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub fn random() -> io::Result<Secret> {
        Ok(Secret(challenge()?.to_vec()))
    }

    /// The secret from bytes received over a channel that only the job can read.
    pub fn from_bytes(bytes: &[u8]) -> Secret {
        Secret(bytes.to_vec())
    }

    /// The bytes, for a channel that only the job can read.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn mac(&self, side: Side, challenges: &[[u8; PROOF]; 2]) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("invariant: any key length is allowed");
        mac.update(match side {
            Side::Listens => b"frit listens",
            Side::Connects => b"frit connects",
        });
        challenges.iter().for_each(|c| mac.update(c));
        mac
    }

    /// The proof of `side` for the challenges of the side that listens and of the one that connects.
    pub(super) fn prove(&self, side: Side, challenges: &[[u8; PROOF]; 2]) -> [u8; PROOF] {
        self.mac(side, challenges).finalize().into_bytes().into()
    }

    /// Whether a proof of `side` is correct, in constant time.
    pub(super) fn accepts(&self, side: Side, challenges: &[[u8; PROOF]; 2], proof: &[u8]) -> bool {
        self.mac(side, challenges).verify_slice(proof).is_ok()
    }
}

/// Random bytes that the other side must answer.
pub(super) fn challenge() -> io::Result<[u8; PROOF]> {
    let mut bytes = [0; PROOF];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// The source of a job's secret.
#[derive(Clone)]
pub enum SecretSource {
    /// The secret itself.
    Known(Secret),
    /// A file, which rank 0 writes and the others read.
    File(PathBuf),
}

/// The file of a job's secret, removed when all processes have connected.
pub(super) struct Written(PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        // It may already have been removed.
        let _ = fs::remove_file(&self.0);
    }
}

impl SecretSource {
    /// Finds the source for a job.
    ///
    /// # Errors
    /// If the job is on several machines and was given neither variable, or a secret that is too short.
    pub fn of(
        launch: &Launch,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<SecretSource, String> {
        if let Some(text) = variable(SECRET_VARIABLE) {
            if text.len() < SHORTEST {
                return Err(format!("{SECRET_VARIABLE} has fewer than {SHORTEST} bytes"));
            }
            return Ok(SecretSource::Known(Secret(text.into_bytes())));
        }
        if let Some(path) = variable(FILE_VARIABLE) {
            return Ok(SecretSource::File(path.into()));
        }
        let Some((host, port)) = &launch.master else {
            return Err("several processes need MASTER_ADDR and MASTER_PORT".into());
        };
        if !is_one_machine(launch, host, variable) {
            return Err(format!(
                "ranks on several machines need a secret that they share: set {SECRET_VARIABLE} to the same text on \
                 every rank, or {FILE_VARIABLE} to a path that all ranks see, where rank 0 writes one"
            ));
        }
        let directory = private_directory()
            .map_err(|e| format!("{e}; set {SECRET_VARIABLE} to the same text on every rank"))?;
        Ok(SecretSource::File(directory.join(format!("rendezvous-{port}"))))
    }

    /// The secret on rank 0, which may generate it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn make(&self) -> Result<(Secret, Option<Written>), String> {
        let path = match self {
            SecretSource::Known(secret) => return Ok((secret.clone(), None)),
            SecretSource::File(path) => path,
        };
        let write = || -> io::Result<Secret> {
            let secret = Secret::random()?;
            // A file left by another job is replaced atomically: readers see a complete secret, old or new.
            let part = path.with_extension(format!("{}.part", std::process::id()));
            let _ = fs::remove_file(&part);
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
            file.write_all(secret.bytes())?;
            fs::rename(&part, path)?;
            Ok(secret)
        };
        let secret = write()
            .map_err(|e| format!("rank 0 cannot write the secret to {}: {e}", path.display()))?;
        Ok((secret, Some(Written(path.clone()))))
    }

    /// The secret on other ranks; rank 0 may not have written it yet.
    ///
    /// # Errors
    /// If the file does not exist.
    pub(super) fn read(&self) -> Result<Secret, String> {
        match self {
            SecretSource::Known(secret) => Ok(secret.clone()),
            SecretSource::File(path) => fs::read(path).map(Secret).map_err(|e| {
                format!("the secret of rank 0 cannot be read from {}: {e}", path.display())
            }),
        }
    }

    /// Whether the secret may change until it is read again.
    pub(super) fn may_change(&self) -> bool {
        matches!(self, SecretSource::File(_))
    }
}

/// Whether all ranks are on this machine, by what the launcher says or by the address of rank 0.
fn is_one_machine(launch: &Launch, host: &str, variable: impl Fn(&str) -> Option<String>) -> bool {
    launch.local_size == Some(launch.world_size)
        || variable("SLURM_NNODES").is_some_and(|n| n.trim() == "1")
        || addresses(host).iter().any(IpAddr::is_loopback)
}

fn addresses(host: &str) -> Vec<IpAddr> {
    (host, 0).to_socket_addrs().map(|all| all.map(|a| a.ip()).collect()).unwrap_or_default()
}

/// A directory of this user that no other can read.
fn private_directory() -> Result<PathBuf, String> {
    let user = fs::metadata("/proc/self").map_err(|e| format!("/proc/self: {e}"))?.uid();
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|p| p.is_dir());
    let path = base.unwrap_or_else(std::env::temp_dir).join(format!("frit-{user}"));
    let made = DirBuilder::new().mode(0o700).create(&path);
    match made {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(format!("{} cannot be made: {e}", path.display()));
        }
        _ => {}
    }
    is_private(&path, user).then_some(path.clone()).ok_or_else(|| {
        format!("{} is not a directory that only this user can read", path.display())
    })
}

fn is_private(path: &Path, user: u32) -> bool {
    let found = fs::symlink_metadata(path);
    found.is_ok_and(|m| m.is_dir() && m.uid() == user && m.mode() & 0o077 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(host: &str) -> Launch {
        let master = Some((host.into(), 29500));
        Launch {
            rank: 1,
            world_size: 4,
            local_rank: Some(1),
            local_size: None,
            master,
            by_mpirun: false,
        }
    }

    fn source(host: &str, variables: &[(&str, &str)]) -> Result<SecretSource, String> {
        let find =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        SecretSource::of(&launch(host), find)
    }

    #[test]
    fn ranks_of_one_machine_need_no_variable_and_those_of_several_do() {
        for (host, variables) in [("127.0.0.1", &[][..]), ("192.0.2.1", &[("SLURM_NNODES", "1")])] {
            assert!(
                matches!(source(host, variables), Ok(SecretSource::File(_))),
                "{host} {variables:?}"
            );
        }
        let there = Launch { local_size: Some(4), ..launch("192.0.2.1") };
        assert!(matches!(SecretSource::of(&there, |_| None), Ok(SecretSource::File(_))));
        for variables in [&[][..], &[("SLURM_NNODES", "2")]] {
            let error = source("192.0.2.1", variables).err().expect("an error");
            assert!(error.contains(SECRET_VARIABLE) && error.contains(FILE_VARIABLE), "{error}");
        }
        let known = source("192.0.2.1", &[(SECRET_VARIABLE, "sixteen bytes ok")]);
        assert!(matches!(known, Ok(SecretSource::Known(_))));
        let short = source("192.0.2.1", &[(SECRET_VARIABLE, "short")]);
        assert!(short.err().expect("an error").contains("fewer than 16 bytes"));
    }

    #[test]
    fn the_file_is_for_this_user_alone_and_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        fs::write(&path, "of an earlier job").unwrap();
        let file = SecretSource::File(path.clone());
        let (made, written) = file.make().unwrap_or_else(|e| panic!("{e}"));
        assert!(file.read().is_ok_and(|read| read == made));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(written);
        assert!(file.read().err().expect("an error").contains("cannot be read"));
    }

    #[test]
    fn a_directory_that_others_read_is_not_private() {
        let dir = tempfile::tempdir().unwrap();
        let user = fs::metadata(dir.path()).unwrap().uid();
        let own = dir.path().join("own");
        DirBuilder::new().mode(0o700).create(&own).unwrap();
        assert!(is_private(&own, user) && !is_private(&own, user + 1));
        let open = dir.path().join("open");
        DirBuilder::new().mode(0o755).create(&open).unwrap();
        assert!(!is_private(&open, user));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(!is_private(&link, user));
    }

    #[test]
    fn a_proof_is_of_one_secret_one_side_and_one_meeting() {
        let (a, b) = (Secret::random().unwrap(), Secret::random().unwrap());
        let challenges = [challenge().unwrap(), challenge().unwrap()];
        let proof = a.prove(Side::Connects, &challenges);
        assert!(a.accepts(Side::Connects, &challenges, &proof));
        assert!(!a.accepts(Side::Listens, &challenges, &proof));
        assert!(!b.accepts(Side::Connects, &challenges, &proof));
        let swapped = [challenges[1], challenges[0]];
        assert!(!a.accepts(Side::Connects, &swapped, &proof));
        assert!(!a.accepts(Side::Connects, &challenges, &proof[..31]));
    }
}
