//! Processes of one job finding each other: rank 0 listens, all others connect, everyone says which plan it
//! runs, and rank 0 hands out what all must know. The connections stay open: a process that ends without
//! saying so is noticed by all others at once, whatever their GPUs are waiting for.
//!
//! # Protocol
//! Messages are one byte of kind, four bytes of length (little-endian), and as many bytes.

use super::launch::Launch;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Why processes do not come, or stay, together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RendezvousError(String);

type Result<T = ()> = std::result::Result<T, RendezvousError>;

fn fail<T>(message: String) -> Result<T> {
    Err(RendezvousError(message))
}

/// Who says what: rank, number of processes and hash of the plan, separated by spaces.
const HELLO: u8 = b'h';
/// From rank 0: what all must know.
const SHARE: u8 = b's';
/// What went wrong, and that the receiver must end.
const FAILED: u8 = b'f';
/// The sender is done, and will say no more.
const DONE: u8 = b'd';
/// No message is longer, in bytes.
const LONGEST: usize = 64 << 20;

/// One process's connections to the others.
pub struct Rendezvous {
    rank: usize,
    world_size: usize,
    timeout: Duration,
    /// On rank 0 those to all others, by rank; on others that to rank 0.
    peers: Vec<(usize, TcpStream)>,
    failure: Arc<Mutex<Option<String>>>,
}

impl Rendezvous {
    /// Finds the other processes. They must come within `timeout`, and run the plan with this hash.
    ///
    /// # Errors
    /// Who did not come, or runs something else.
    pub fn meet(launch: &Launch, plan_hash: &str, timeout: Duration) -> Result<Rendezvous> {
        let Some((host, port)) = &launch.master else {
            return fail("several processes need MASTER_ADDR and MASTER_PORT".into());
        };
        let mut meeting = Rendezvous {
            rank: launch.rank,
            world_size: launch.world_size,
            timeout,
            peers: Vec::new(),
            failure: Arc::default(),
        };
        let end = Instant::now() + timeout;
        if launch.rank == 0 {
            meeting.peers = meeting.host(*port, plan_hash, end)?;
        } else {
            let stream = connect(host, *port, end).map_err(|e| {
                RendezvousError(format!("rank 0 does not answer at {host}:{port}: {e}"))
            })?;
            let hello = format!("{} {} {plan_hash}", launch.rank, launch.world_size);
            meeting.peers = vec![(0, stream)];
            meeting.send(0, HELLO, hello.as_bytes())?;
        }
        // Rank 0 says to all at once that all are there.
        meeting.share(Vec::new())?;
        Ok(meeting)
    }

    /// Waits for all others.
    fn host(&self, port: u16, hash: &str, end: Instant) -> Result<Vec<(usize, TcpStream)>> {
        let listener = TcpListener::bind(("0.0.0.0", port))
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .map_err(|e| RendezvousError(format!("rank 0 cannot listen at port {port}: {e}")))?;
        let mut peers: Vec<(usize, TcpStream)> = Vec::new();
        while peers.len() + 1 < self.world_size {
            if Instant::now() >= end {
                let missing: Vec<String> = (1..self.world_size)
                    .filter(|r| peers.iter().all(|(p, _)| p != r))
                    .map(|r| r.to_string())
                    .collect();
                let seconds = self.timeout.as_secs_f64();
                let reason = format!("rank {} did not come within {seconds} s", missing.join(", "));
                refuse(&mut peers, &reason);
                return fail(reason);
            }
            let Ok((mut stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            // A stranger that says nothing must not stop the meeting.
            let patience = Duration::from_secs(5).min(self.timeout);
            let hello = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(patience)))
                .and_then(|()| receive(&mut stream));
            let Ok((HELLO, hello)) = hello else { continue };
            match self.check_hello(&String::from_utf8_lossy(&hello), hash, &peers) {
                Ok(rank) => peers.push((rank, stream)),
                Err(error) => {
                    peers.push((usize::MAX, stream));
                    refuse(&mut peers, &error.0);
                    return Err(error);
                }
            }
        }
        peers.sort_by_key(|(rank, _)| *rank);
        Ok(peers)
    }

    fn check_hello(&self, hello: &str, hash: &str, peers: &[(usize, TcpStream)]) -> Result<usize> {
        let mut words = hello.split(' ');
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok());
        let (Some(rank), Some(world_size)) = (number(), number()) else {
            return fail(format!("a process said `{hello}`, which is no greeting"));
        };
        if world_size != self.world_size || rank == 0 || rank >= world_size {
            return fail(format!(
                "rank {rank} was started for {world_size} processes, rank 0 for {}",
                self.world_size
            ));
        }
        if peers.iter().any(|(r, _)| *r == rank) {
            return fail(format!("two processes were started as rank {rank}"));
        }
        if words.next() != Some(hash) {
            return fail(format!(
                "rank {rank} runs another plan, or other hyper-parameters, than rank 0; give every rank the same"
            ));
        }
        Ok(rank)
    }

    /// This process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Gives every process rank 0's bytes.
    ///
    /// # Errors
    /// If a process ended, or did not answer in time.
    pub fn share(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if self.rank == 0 {
            for i in 0..self.peers.len() {
                self.send(i, SHARE, &bytes)?;
            }
            return Ok(bytes);
        }
        let stream = &mut self.peers[0].1;
        let answer = stream.set_read_timeout(Some(self.timeout)).and_then(|()| receive(stream));
        match answer {
            Ok((SHARE, bytes)) => Ok(bytes),
            Ok((FAILED, reason)) => fail(String::from_utf8_lossy(&reason).into_owned()),
            Ok(_) => fail("rank 0 said something unexpected".into()),
            Err(e) => fail(lost(0, &e, self.timeout)),
        }
    }

    fn send(&mut self, peer: usize, kind: u8, bytes: &[u8]) -> Result {
        let (rank, stream) = &mut self.peers[peer];
        let rank = *rank;
        transmit(stream, kind, bytes).map_err(|e| RendezvousError(lost(rank, &e, self.timeout)))
    }

    /// From here on, processes that end without saying so are noticed; see [`Rendezvous::failure`].
    ///
    /// # Errors
    /// If a connection cannot be watched.
    pub fn watch(&self) -> Result {
        for (rank, stream) in &self.peers {
            let rank = *rank;
            let watched = stream
                .try_clone()
                .and_then(|s| s.set_read_timeout(None).map(|()| s))
                .map_err(|e| RendezvousError(lost(rank, &e, self.timeout)));
            let mut stream = watched?;
            let failure = self.failure.clone();
            let mut others = Vec::new();
            for (other, stream) in self.peers.iter().filter(|(other, _)| *other != rank) {
                if let Ok(stream) = stream.try_clone() {
                    others.push((*other, stream));
                }
            }
            std::thread::spawn(move || {
                let reason = match receive(&mut stream) {
                    Ok((DONE, _)) => return,
                    Ok((FAILED, reason)) => String::from_utf8_lossy(&reason).into_owned(),
                    Ok(_) => format!("rank {rank} said something unexpected"),
                    Err(_) => format!("rank {rank} ended, or its machine cannot be reached"),
                };
                let mut noted = failure.lock().unwrap_or_else(PoisonError::into_inner);
                if noted.is_none() {
                    *noted = Some(reason.clone());
                    refuse(&mut others, &reason);
                }
            });
        }
        Ok(())
    }

    /// What another process did wrong, if one did.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells the others that this process cannot go on.
    pub fn fail(&self, reason: &str) {
        let mut noted = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.is_none() {
            *noted = Some(reason.into());
            for (_, stream) in &self.peers {
                // One that is gone needs not be told.
                let _ = stream
                    .try_clone()
                    .and_then(|mut s| transmit(&mut s, FAILED, reason.as_bytes()));
            }
        }
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        for (_, stream) in &mut self.peers {
            // One that is gone needs not be told.
            let _ = transmit(stream, DONE, &[]);
        }
    }
}

/// Tells processes to end.
fn refuse(peers: &mut [(usize, TcpStream)], reason: &str) {
    for (_, stream) in peers {
        let _ = transmit(stream, FAILED, reason.as_bytes());
    }
}

fn lost(rank: usize, error: &io::Error, timeout: Duration) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("rank {rank} did not answer within {} s", timeout.as_secs_f64())
        }
        _ => format!("rank {rank} ended, or its machine cannot be reached ({error})"),
    }
}

fn connect(host: &str, port: u16, end: Instant) -> io::Result<TcpStream> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let tried = (host, port).to_socket_addrs().and_then(|mut addresses| {
            let address = addresses.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
            TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1)))
        });
        match tried {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(e) if left.is_zero() => return Err(e),
            // Rank 0 may not listen yet.
            Err(_) => std::thread::sleep(Duration::from_millis(50).min(left)),
        }
    }
}

fn transmit(stream: &mut TcpStream, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let mut message = vec![kind];
    message.extend((bytes.len() as u32).to_le_bytes());
    message.extend(bytes);
    stream.write_all(&message)
}

fn receive(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok((kind, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(rank: usize, world_size: usize, port: u16) -> Launch {
        let master = Some(("127.0.0.1".to_string(), port));
        Launch { rank, world_size, local_rank: rank, master }
    }

    /// A port that nothing listened at a moment ago.
    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// Every rank on a thread.
    fn on_ranks<T: Send>(n: usize, f: impl Fn(Launch) -> T + Sync) -> Vec<T> {
        let port = free_port();
        std::thread::scope(|scope| {
            let f = &f;
            let ranks: Vec<_> =
                (0..n).map(|r| scope.spawn(move || f(launch(r, n, port)))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn all_learn_what_rank_0_says() {
        let results = on_ranks(3, |launch| {
            let mut meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            let own = format!("from {}", launch.rank).into_bytes();
            meeting.share(own).unwrap()
        });
        assert!(results.iter().all(|r| r == b"from 0"));
    }

    #[test]
    fn a_rank_with_another_plan_is_named_to_all() {
        let results = on_ranks(3, |launch| {
            let hash = if launch.rank == 2 { "other" } else { "abc" };
            Rendezvous::meet(&launch, hash, PATIENCE).err().map(|e| e.to_string())
        });
        let named =
            |e: &Option<String>| e.as_ref().is_some_and(|e| e.contains("rank 2 runs another"));
        // Rank 1 may find rank 0 gone before it was heard.
        assert!(named(&results[0]) && named(&results[2]) && results[1].is_some(), "{results:?}");
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_in_time() {
        let port = free_port();
        let results = std::thread::scope(|scope| {
            let patience = Duration::from_millis(300);
            let ranks: Vec<_> = [0, 2]
                .map(|r| {
                    scope
                        .spawn(move || Rendezvous::meet(&launch(r, 3, port), "abc", patience).err())
                })
                .into();
            ranks.into_iter().map(|r| r.join().unwrap().unwrap().to_string()).collect::<Vec<_>>()
        });
        assert!(results[0].contains("rank 1 did not come within 0.3 s"), "{results:?}");
    }

    #[test]
    fn a_rank_that_ends_is_noticed_by_all() {
        let results = on_ranks(3, |launch| {
            let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            if launch.rank == 1 {
                // As a killed process: the connection closes and nothing was said.
                meeting.peers[0].1.shutdown(std::net::Shutdown::Both).unwrap();
                return "rank 1 ended".into();
            }
            meeting.watch().unwrap();
            let end = Instant::now() + PATIENCE;
            while Instant::now() < end {
                if let Some(failure) = meeting.failure() {
                    return failure;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            "nothing was noticed".into()
        });
        assert!(results.iter().all(|r| r.starts_with("rank 1 ended")), "{results:?}");
    }

    #[test]
    fn a_rank_that_is_done_is_no_failure() {
        let results = on_ranks(2, |launch| {
            let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            meeting.watch().unwrap();
            if launch.rank == 1 {
                return None;
            }
            std::thread::sleep(Duration::from_millis(200));
            meeting.failure()
        });
        assert_eq!(results, [None, None]);
    }
}
