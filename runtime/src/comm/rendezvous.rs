//! Processes of one job finding each other: rank 0 listens, all others connect, everyone says which plan it
//! runs, and rank 0 hands out what all must know. The connections stay open: a process that ends without
//! saying so is noticed by all others at once, whatever their GPUs are waiting for.
//!
//! # Protocol
//! Messages are one byte of kind, four bytes of length (little-endian), and as many bytes.

use super::launch::Launch;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
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
/// A number that all compare; from rank 0 the largest.
const NUMBER: u8 = b'n';
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
    /// How many of the others have said that they are done.
    done: Arc<AtomicUsize>,
    /// What rank 0 shared since it is watched, and whether it is.
    inbox: Arc<(Mutex<VecDeque<Vec<u8>>>, Condvar)>,
    watched: AtomicBool,
    /// The numbers that the others said, and that were not yet compared, by position in `peers`.
    numbers: Arc<(Mutex<Vec<VecDeque<u64>>>, Condvar)>,
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
            done: Arc::default(),
            inbox: Arc::default(),
            watched: AtomicBool::new(false),
            numbers: Arc::default(),
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
        *meeting.numbers.0.lock().unwrap_or_else(PoisonError::into_inner) =
            vec![VecDeque::new(); meeting.peers.len()];
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
        if self.watched.load(Ordering::Acquire) {
            return self.heard();
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

    /// What rank 0 shares, heard by who watches it.
    fn heard(&self) -> Result<Vec<u8>> {
        let end = Instant::now() + self.timeout;
        let mut inbox = self.inbox.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(bytes) = inbox.pop_front() {
                return Ok(bytes);
            }
            if let Some(reason) = self.failure() {
                return fail(reason);
            }
            if Instant::now() >= end {
                let seconds = self.timeout.as_secs_f64();
                return fail(format!("rank 0 did not answer within {seconds} s"));
            }
            // A failure is noticed soon though nobody notifies of it.
            let waited = self.inbox.1.wait_timeout(inbox, Duration::from_millis(20));
            inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives every process the bytes of all, by rank; before they are watched.
    ///
    /// # Errors
    /// If a process ended, or did not answer in time.
    pub fn all(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut packed = Vec::new();
        let mut pack = |bytes: &[u8]| {
            packed.extend((bytes.len() as u32).to_le_bytes());
            packed.extend(bytes);
        };
        if self.rank > 0 {
            self.send(0, SHARE, own)?;
        } else {
            pack(own);
            for (rank, stream) in &mut self.peers {
                let answer =
                    stream.set_read_timeout(Some(self.timeout)).and_then(|()| receive(stream));
                match answer {
                    Ok((SHARE, bytes)) => pack(&bytes),
                    Ok((FAILED, reason)) => {
                        return fail(String::from_utf8_lossy(&reason).into_owned());
                    }
                    Ok(_) => return fail(format!("rank {rank} said something unexpected")),
                    Err(e) => return fail(lost(*rank, &e, self.timeout)),
                }
            }
        }
        let packed = self.share(packed)?;
        let (mut rest, mut all) = (&packed[..], Vec::new());
        while let Some((length, bytes)) = rest.split_first_chunk::<4>() {
            let length = (u32::from_le_bytes(*length) as usize).min(bytes.len());
            let (one, others) = bytes.split_at(length);
            all.push(one.to_vec());
            rest = others;
        }
        match all.len() == self.world_size {
            true => Ok(all),
            false => fail("rank 0 said something unexpected".into()),
        }
    }

    /// The address under which the others reach this process.
    pub fn address(&self) -> IpAddr {
        let addresses: Vec<IpAddr> =
            self.peers.iter().filter_map(|(_, s)| Some(s.local_addr().ok()?.ip())).collect();
        // Processes on this machine may have come the short way; those on others have not.
        let outside = addresses.iter().find(|a| !a.is_loopback()).or(addresses.first());
        outside.copied().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
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
        self.watched.store(true, Ordering::Release);
        for (peer, (rank, stream)) in self.peers.iter().enumerate() {
            let rank = *rank;
            let (numbers, inbox) = (self.numbers.clone(), self.inbox.clone());
            let watched = stream
                .try_clone()
                .and_then(|s| s.set_read_timeout(None).map(|()| s))
                .map_err(|e| RendezvousError(lost(rank, &e, self.timeout)));
            let mut stream = watched?;
            let (failure, done) = (self.failure.clone(), self.done.clone());
            let mut others = Vec::new();
            for (other, stream) in self.peers.iter().filter(|(other, _)| *other != rank) {
                if let Ok(stream) = stream.try_clone() {
                    others.push((*other, stream));
                }
            }
            std::thread::spawn(move || {
                let reason = loop {
                    match receive(&mut stream) {
                        Ok((DONE, _)) => {
                            done.fetch_add(1, Ordering::Release);
                            return;
                        }
                        Ok((NUMBER, bytes)) => {
                            let Some(bytes) = bytes.first_chunk::<8>() else { continue };
                            let mut said = numbers.0.lock().unwrap_or_else(PoisonError::into_inner);
                            said[peer].push_back(u64::from_le_bytes(*bytes));
                            numbers.1.notify_all();
                        }
                        Ok((SHARE, bytes)) => {
                            let mut heard = inbox.0.lock().unwrap_or_else(PoisonError::into_inner);
                            heard.push_back(bytes);
                            inbox.1.notify_all();
                        }
                        Ok((FAILED, reason)) => {
                            break String::from_utf8_lossy(&reason).into_owned();
                        }
                        Ok(_) => break format!("rank {rank} said something unexpected"),
                        Err(_) => {
                            break format!("rank {rank} ended, or its machine cannot be reached");
                        }
                    }
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

    /// The largest of every process's `value`. Every process must ask, and they must be watched.
    ///
    /// # Errors
    /// If another process fails, or does not ask in time.
    pub fn largest(&self, value: u64) -> Result<u64> {
        let say = |peer: usize, value: u64| {
            let (rank, stream) = &self.peers[peer];
            let said =
                stream.try_clone().and_then(|mut s| transmit(&mut s, NUMBER, &value.to_le_bytes()));
            said.map_err(|e| RendezvousError(lost(*rank, &e, self.timeout)))
        };
        if self.rank != 0 {
            say(0, value)?;
        }
        let end = Instant::now() + self.timeout;
        let mut said = self.numbers.0.lock().unwrap_or_else(PoisonError::into_inner);
        while said.iter().any(VecDeque::is_empty) {
            if let Some(reason) = self.failure() {
                return fail(reason);
            }
            if Instant::now() >= end {
                let silent = said.iter().position(VecDeque::is_empty).unwrap_or_default();
                let (rank, seconds) = (self.peers[silent].0, self.timeout.as_secs_f64());
                return fail(format!("rank {rank} did not answer within {seconds} s"));
            }
            // A failure is noticed soon though nobody notifies of it.
            let pause = Duration::from_millis(20);
            let waited = self.numbers.1.wait_timeout(said, pause);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let others = said.iter_mut().filter_map(VecDeque::pop_front).max().unwrap_or_default();
        drop(said);
        let largest = value.max(others);
        if self.rank == 0 {
            (0..self.peers.len()).try_for_each(|peer| say(peer, largest))?;
        }
        Ok(largest)
    }

    /// What another process did wrong, if one did.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says that this process is done, and waits until all others are; they must be watched. A process whose
    /// connections close without this has ended by accident.
    ///
    /// # Errors
    /// If another process fails, or is not done in time.
    pub fn finish(mut self) -> Result {
        // Rank 0 says it last: whoever hears it may go.
        if self.rank != 0 {
            self.send(0, DONE, &[])?;
        }
        let end = Instant::now() + self.timeout;
        while self.done.load(Ordering::Acquire) < self.peers.len() {
            if let Some(reason) = self.failure() {
                return fail(reason);
            }
            if Instant::now() >= end {
                let seconds = self.timeout.as_secs_f64();
                return fail(format!("not every rank was done within {seconds} s"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.rank == 0 {
            for i in 0..self.peers.len() {
                self.send(i, DONE, &[])?;
            }
        }
        Ok(())
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
        Launch { rank, world_size, local_rank: rank, master, by_mpirun: false }
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
    fn all_learn_what_each_says() {
        let results = on_ranks(3, |launch| {
            let mut meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            meeting.all(&vec![launch.rank as u8; launch.rank]).unwrap()
        });
        assert!(results.iter().all(|r| *r == [vec![], vec![1], vec![2, 2]]));
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
    fn ranks_agree_on_the_largest_number_again_and_again() {
        let results = on_ranks(3, |launch| {
            let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            meeting.watch().unwrap();
            let rank = launch.rank as u64;
            let agreed: Vec<u64> =
                [rank, 10 - rank, 7].iter().map(|v| meeting.largest(*v).unwrap()).collect();
            meeting.finish().unwrap();
            agreed
        });
        assert_eq!(results, vec![vec![2, 10, 7]; 3]);
    }

    #[test]
    fn who_watches_still_hears_what_rank_0_shares_and_that_it_failed() {
        let results = on_ranks(3, |launch| {
            let mut meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            meeting.watch().unwrap();
            let shared = meeting.share(format!("from {}", launch.rank).into_bytes()).unwrap();
            if launch.rank == 0 {
                meeting.fail("rank 0 stopped: no memory");
                return (shared, None);
            }
            (shared, meeting.share(vec![]).err().map(|e| e.to_string()))
        });
        assert!(results.iter().all(|(shared, _)| shared == b"from 0"));
        let told = |(_, error): &(_, Option<String>)| {
            error.as_deref() == Some("rank 0 stopped: no memory")
        };
        assert!(results[1..].iter().all(told), "{results:?}");
    }

    #[test]
    fn ranks_that_finish_wait_for_each_other_and_do_not_fail() {
        let begun = Instant::now();
        let results = on_ranks(3, |launch| {
            let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            meeting.watch().unwrap();
            let pause = Duration::from_millis(100 * launch.rank as u64);
            std::thread::sleep(pause);
            (meeting.finish(), begun.elapsed())
        });
        for (finished, after) in results {
            assert!(
                finished.is_ok() && after >= Duration::from_millis(200),
                "{finished:?} {after:?}"
            );
        }
    }

    #[test]
    fn a_rank_that_is_dropped_before_it_is_done_is_a_failure() {
        let results = on_ranks(2, |launch| {
            let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
            if launch.rank == 1 {
                return None;
            }
            meeting.watch().unwrap();
            meeting.finish().err().map(|e| e.to_string())
        });
        assert!(results[0].as_ref().is_some_and(|e| e.starts_with("rank 1 ended")), "{results:?}");
    }
}
