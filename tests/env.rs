//! The environments, each under a random and a perfect player who read nothing but what a policy
//! reads. Returns are compared with what they must be.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;

use gradprism::config::{
    BanditConfig, CountdownConfig, CountdownTasks, DrawnMapConfig, FrozenLakeConfig, MapConfig,
};
use gradprism::env::{
    Comparison, Countdown, Direction, End, Environment, Episode, FrozenLake, Group, MessageStyle,
    Question, Questions, Rules, Seed, Solvable, View,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const PLAYS: u64 = 4_000;

fn bare() -> Rules {
    Rules { message: MessageStyle::Bare, ..Rules::default() }
}

fn seed(task: u64) -> Seed {
    Seed { task, visit: 3, trajectory: 1 }
}

/// Plays to the end; the player sees the observation and gives an answer.
fn play(
    environment: &dyn Environment,
    rules: &Rules,
    seed: Seed,
    mut player: impl FnMut(&str) -> String,
) -> Episode {
    let mut episode = Episode::start(environment.fork().unwrap(), rules.clone(), seed).unwrap();
    while episode.end().is_none() {
        let answer = player(&episode.message());
        episode.respond(&rules.tags.wrap("so", &answer)).unwrap();
    }
    episode
}

/// The mean over tasks 0, 1, ...
fn mean(plays: u64, value: impl FnMut(u64) -> f64) -> f64 {
    (0..plays).map(value).sum::<f64>() / plays as f64
}

/// Within four standard errors of a mean of `plays` draws with this variance.
#[track_caller]
fn assert_mean(found: f64, expected: f64, variance: f64, plays: u64) {
    let allowed = 4.0 * (variance / plays as f64).sqrt();
    assert!((found - expected).abs() <= allowed, "found {found}, expected {expected} ± {allowed}");
}

// --- bandit ---

fn bandit_return(task: u64, mut pick: impl FnMut(bool) -> &'static str) -> Episode {
    let bandit = BanditConfig::default().environment().unwrap();
    play(&bandit, &bare(), seed(task), |text| {
        let low_first = text.find("Phoenix").unwrap() < text.find("Dragon").unwrap();
        pick(low_first).to_owned()
    })
}

#[test]
fn the_arms_of_the_bandit_pay_a_tenth_for_certain_and_a_quarter_on_average() {
    for task in 0..50 {
        let low = bandit_return(task, |_| "phoenix");
        assert_eq!((low.total_reward(), low.success(), low.end()), (0.1, false, Some(End::Done)));
        assert_eq!(low.message(), "Phoenix: 0.1 points");
    }
    let perfect = mean(PLAYS, |task| {
        let high = bandit_return(task, |_| "Dragon");
        assert!(high.success());
        assert!(["Dragon: 1.0 points", "Dragon: 0.0 points"].contains(&high.message().as_str()));
        high.total_reward()
    });
    // Bernoulli(¼): variance 3/16.
    assert_mean(perfect, 0.25, 3.0 / 16.0, PLAYS);
    // (0.1 + 0.25)/2; E r² = ½·0.01 + ½·¼, so that the variance is 0.13 − 0.175².
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let either = mean(PLAYS, |task| {
        let arm = if random.random_bool(0.5) { "Phoenix" } else { "Dragon" };
        bandit_return(task, |_| arm).total_reward()
    });
    assert_mean(either, 0.175, 0.13 - 0.175 * 0.175, PLAYS);
    // The order says nothing.
    let mut low_first = 0.0;
    for task in 0..PLAYS {
        bandit_return(task, |first| {
            low_first += f64::from(u8::from(first));
            "Dragon"
        });
    }
    assert_mean(low_first / PLAYS as f64, 0.5, 0.25, PLAYS);
}

#[test]
fn trajectories_of_a_group_share_the_prompt_and_nothing_else() {
    let bandit = BanditConfig::default().environment().unwrap();
    let pull = |task, visit| {
        let mut group = Group::start(&bandit, &bare(), 2, task, visit).unwrap();
        for episode in &mut group.episodes {
            episode.respond("<think></think><answer>Dragon</answer>").unwrap();
        }
        group.rewards()
    };
    // E r₁r₂ = 1/16 where they are independent, and ¼ where they share their chance.
    let products = mean(PLAYS, |task| pull(task, 0).iter().product());
    assert_mean(products, 1.0 / 16.0, 15.0 / 256.0, PLAYS);
    // The same between two visits.
    let products = mean(PLAYS, |task| pull(task, 0)[0] * pull(task, 1)[0]);
    assert_mean(products, 1.0 / 16.0, 15.0 / 256.0, PLAYS);
    assert!((0..50).all(|task| pull(task, 7) == pull(task, 7)), "seeded");
}

// --- frozen lake ---

/// A board as it is read from the grid.
#[derive(Clone)]
struct Board {
    cells: Vec<Vec<char>>,
    player: (usize, usize),
}

/// Who plays best, or at random, on ice that slips; with what is known of one board.
struct Player {
    slip: f64,
    best: bool,
    known: HashMap<((usize, usize), usize), (f64, Direction)>,
}

impl Player {
    fn new(slip: f64, best: bool) -> Self {
        Self { slip, best, known: HashMap::new() }
    }
}

impl Board {
    fn read(text: &str) -> Self {
        let cells: Vec<Vec<char>> = text.lines().map(|line| line.chars().collect()).collect();
        let player = (0..cells.len())
            .flat_map(|row| (0..cells[row].len()).map(move |column| (row, column)))
            .find(|(row, column)| "PX√".contains(cells[*row][*column]))
            .unwrap();
        Self { cells, player }
    }

    fn to(&self, (row, column): (usize, usize), direction: Direction) -> (usize, usize) {
        let (rows, columns) = (self.cells.len(), self.cells[0].len());
        match direction {
            Direction::Left => (row, column.saturating_sub(1)),
            Direction::Down => ((row + 1).min(rows - 1), column),
            Direction::Right => (row, (column + 1).min(columns - 1)),
            Direction::Up => (row.saturating_sub(1), column),
        }
    }

    fn at(&self, (row, column): (usize, usize)) -> char {
        self.cells[row][column]
    }

    /// Pr(goal within `moves`), and the first move, of `who` plays so.
    fn value(&self, place: (usize, usize), moves: usize, who: &mut Player) -> (f64, Direction) {
        let worth = match self.at(place) {
            'G' => Some(1.0),
            'O' => Some(0.0),
            _ => (moves == 0).then_some(0.0),
        };
        if let Some(worth) = worth {
            return (worth, Direction::Left);
        }
        if let Some(known) = who.known.get(&(place, moves)) {
            return *known;
        }
        let straight =
            Direction::ALL.map(|direction| self.value(self.to(place, direction), moves - 1, who).0);
        // The sides of Left are Up and Down, and so on around the circle.
        let sides = |at: usize| straight[(at + 1) % 4] + straight[(at + 3) % 4];
        let slipped: Vec<f64> =
            (0..4).map(|at| (1.0 - who.slip) * straight[at] + who.slip / 2.0 * sides(at)).collect();
        let top = (0..4).max_by(|a, b| slipped[*a].total_cmp(&slipped[*b])).unwrap();
        let worth = if who.best { slipped[top] } else { slipped.iter().sum::<f64>() / 4.0 };
        who.known.insert((place, moves), (worth, Direction::ALL[top]));
        (worth, Direction::ALL[top])
    }

    /// The first move of a shortest way.
    fn shortest(&self) -> Direction {
        let mut who = Player::new(0.0, true);
        (1..17)
            .map(|moves| self.value(self.player, moves, &mut who))
            .find(|(worth, _)| *worth == 1.0)
            .unwrap()
            .1
    }

    /// Cells that can be reached around the holes.
    fn reach(&self) -> BTreeSet<(usize, usize)> {
        let mut reached = BTreeSet::from([self.player]);
        let mut open = vec![self.player];
        while let Some(place) = open.pop() {
            for next in Direction::ALL.map(|direction| self.to(place, direction)) {
                if self.at(next) != 'O' && reached.insert(next) {
                    open.push(next);
                }
            }
        }
        reached
    }
}

fn drawn(size: usize, frozen: f64, slip: f64) -> FrozenLake {
    let map = MapConfig::Drawn(DrawnMapConfig { size, frozen });
    FrozenLakeConfig { map, slip, view: View::Grid, ..Default::default() }.environment().unwrap()
}

fn fixed(rows: &[&str], slip: f64, view: View) -> FrozenLake {
    let map = MapConfig::Rows(rows.iter().map(|row| (*row).to_owned()).collect());
    FrozenLakeConfig { map, slip, view, ..Default::default() }.environment().unwrap()
}

/// The return of ten moves, one a turn, chosen with the number that are left.
fn walk(lake: &FrozenLake, task: u64, mut choose: impl FnMut(&Board, usize) -> Direction) -> f64 {
    let rules = Rules { max_turns: 10, ..bare() };
    let mut left = 11;
    let episode = play(lake, &rules, seed(task), |text| {
        left -= 1;
        choose(&Board::read(text), left).name().to_owned()
    });
    episode.total_reward()
}

#[test]
fn every_board_has_a_way_to_the_goal_whatever_its_size() {
    for (size, frozen, boards) in [(2, 0.0, 100), (4, 0.8, 300), (4, 0.3, 100), (9, 0.7, 100)] {
        let mut lake = drawn(size, frozen, 0.0);
        let mut seen = BTreeSet::new();
        for task in 0..boards {
            lake.reset(seed(task)).unwrap();
            let text = lake.observe();
            let board = Board::read(&text);
            assert!(board.cells.len() == size && board.cells.iter().all(|row| row.len() == size));
            let marks = |mark: char| text.chars().filter(|sign| *sign == mark).count();
            assert_eq!((marks('P'), marks('G')), (1, 1), "{text}");
            assert!(board.reach().iter().any(|place| board.at(*place) == 'G'), "{text}");
            seen.insert(text);
        }
        // 2×2 without a frozen cell: start and goal side by side, 8 of the 12 ordered pairs.
        let all = if size == 2 { 8 } else { (boards * 9 / 10) as usize };
        assert!(seen.len() >= all, "{} different boards of size {size}", seen.len());
    }
}

#[test]
fn the_perfect_player_always_reaches_the_goal_of_a_four_by_four_lake_without_slip() {
    // Two moves a turn, five turns: the longest of all shortest ways around holes takes ten.
    let lake = drawn(4, 0.8, 0.0);
    for task in 0..300 {
        let episode = play(&lake, &bare(), seed(task), |text| {
            let mut board = Board::read(text);
            let first = board.shortest();
            board.player = board.to(board.player, first);
            let second = if board.at(board.player) == 'G' { first } else { board.shortest() };
            format!("{} || {}", first.name(), second.name())
        });
        assert_eq!(episode.total_reward(), 1.0, "task {task}");
        assert!(episode.success() && episode.end() == Some(End::Done));
        assert!(episode.turns().iter().all(|turn| turn.effective == turn.actions.len()));
    }
}

#[test]
fn returns_on_slippery_ice_are_those_of_the_bellman_equation() {
    for slip in [0.0, 0.2, 2.0 / 3.0] {
        let lake = fixed(&["SFFF", "FHFH", "FFFH", "HFFG"], slip, View::Grid);
        let board = Board::read(&lake.observe());
        let mut perfect = Player::new(slip, true);
        let (best, _) = board.value(board.player, 10, &mut perfect);
        let found = mean(PLAYS, |task| {
            walk(&lake, task, |board, left| board.value(board.player, left, &mut perfect).1)
        });
        assert_mean(found, best, best * (1.0 - best), PLAYS);
        // Who moves at random slips at random: the same return on any ice.
        let (chance, _) = board.value(board.player, 10, &mut Player::new(0.0, false));
        let mut random = ChaCha8Rng::seed_from_u64(2);
        let found =
            mean(PLAYS, |task| walk(&lake, task, |_, _| Direction::ALL[random.random_range(0..4)]));
        assert_mean(found, chance, chance * (1.0 - chance), PLAYS);
        assert!(best > 3.0 * chance, "{best} {chance}");
    }
}

#[test]
fn a_move_slips_to_either_side_alike_and_never_back() {
    for slip in [0.0, 0.3, 2.0 / 3.0, 1.0] {
        let mut lake = fixed(&["FFF", "FSF", "FFG"], slip, View::Grid);
        let mut ends = HashMap::new();
        for task in 0..PLAYS {
            lake.reset(seed(task)).unwrap();
            let outcome = lake.act("Right").unwrap().unwrap();
            assert!(outcome.effective && !outcome.done && outcome.reward == 0.0);
            *ends.entry(Board::read(&lake.observe()).player).or_insert(0) += 1;
        }
        let share = |place| f64::from(ends.get(&place).copied().unwrap_or(0)) / PLAYS as f64;
        assert_mean(share((1, 2)), 1.0 - slip, slip * (1.0 - slip), PLAYS);
        for side in [(0, 1), (2, 1)] {
            assert_mean(share(side), slip / 2.0, slip / 2.0 * (1.0 - slip / 2.0), PLAYS);
        }
        assert_eq!(share((1, 0)), 0.0);
    }
}

#[test]
fn a_group_walks_one_map_and_slips_apart() {
    let lake = drawn(5, 0.9, 2.0 / 3.0);
    let walk = |task| {
        let mut group = Group::start(&lake, &bare(), 8, task, 0).unwrap();
        assert!(group.episodes.iter().all(|episode| episode.message() == group.prompt()));
        for episode in &mut group.episodes {
            episode.respond("<think></think><answer>Down||Right</answer>").unwrap();
        }
        group.episodes.iter().map(Episode::message).collect::<Vec<_>>()
    };
    // Eight walks of two slippery moves all end alike on few maps only, and the same ones again.
    let apart = (0..100).filter(|task| walk(*task).iter().collect::<BTreeSet<_>>().len() > 1);
    assert!(apart.count() >= 90);
    assert_eq!(walk(5), walk(5));
}

#[test]
fn the_lake_is_shown_as_in_ragen() {
    let rows = ["SHF", "FFG"];
    let mut lake = fixed(&rows, 0.0, View::GridCoord);
    assert_eq!(
        lake.observe(),
        "Coordinates: \nBoard size: 2 rows x 3 cols (zero-indexed).\nStart: (0, 0)\nGoal: (1, 2)\nPlayer: (0, 0)\nHoles: (0, 1)\nGrid Map: \nPO_\n__G"
    );
    // Up leaves the board: nothing changes. Then into the hole.
    let stay = lake.act("up").unwrap().unwrap();
    assert!(!stay.effective && !stay.done);
    let fall = lake.act("RIGHT").unwrap().unwrap();
    assert_eq!((fall.reward, fall.done, fall.success, fall.effective), (0.0, true, false, true));
    assert!(
        lake.observe().ends_with("Player in hole: (0, 1)\nHoles: (0, 1)\nGrid Map: \n_X_\n__G")
    );
    let message = lake.act("Left").unwrap_err().to_string();
    assert!(message.contains("frozen_lake") && message.contains("over"), "{message}");

    let mut lake = fixed(&rows, 0.0, View::Coord);
    for (action, reward) in [("Down", 0.0), ("Right", 0.0), ("Right", 1.0)] {
        assert_eq!(lake.act(action).unwrap().unwrap().reward, reward);
    }
    assert!(lake.observe().contains("\nPlayer on goal: (1, 2)\n"), "{}", lake.observe());
    let mut lake = fixed(&rows, 0.0, View::Grid);
    assert_eq!(lake.act("jump").unwrap(), None);
    for action in ["Down", "Right", "Right"] {
        lake.act(action).unwrap();
    }
    assert_eq!(lake.observe(), "_O_\n__√");
}

// --- countdown ---

/// Every value that an expression of these numbers comes to, with the expression; f64 is exact enough
/// for so few.
fn solve(values: &[(f64, String)], target: f64) -> Option<String> {
    if let [(value, text)] = values {
        return ((value - target).abs() < 1e-9).then(|| text.clone());
    }
    for left in 0..values.len() {
        for right in (0..values.len()).filter(|right| *right != left) {
            let rest: Vec<_> = (0..values.len())
                .filter(|at| *at != left && *at != right)
                .map(|at| values[at].clone())
                .collect();
            let ((a, p), (b, q)) = (&values[left], &values[right]);
            let results = [(a + b, '+'), (a - b, '-'), (a * b, '*'), (a / b, '/')];
            for (value, sign) in results.into_iter().filter(|(value, _)| value.is_finite()) {
                let mut next = rest.clone();
                next.push((value, format!("({p} {sign} {q})")));
                if let Some(found) = solve(&next, target) {
                    return Some(found);
                }
            }
        }
    }
    None
}

/// `Target: 98, nums: [44, 19, 35]`.
fn read_task(text: &str) -> (f64, Vec<u32>) {
    let (target, nums) = text.strip_prefix("Target: ").unwrap().split_once(", nums: [").unwrap();
    let nums = nums.strip_suffix(']').unwrap().split(", ").map(|number| number.parse().unwrap());
    (target.parse().unwrap(), nums.collect())
}

#[test]
fn a_solver_that_tries_everything_solves_every_drawn_countdown() {
    for solvable in [Solvable::Signs, Solvable::Any] {
        let countdown =
            CountdownConfig { solvable, ..CountdownConfig::default() }.environment().unwrap();
        for task in 0..60 {
            let episode = play(&countdown, &bare(), seed(task), |text| {
                let (target, nums) = read_task(text);
                assert!(
                    (10.0..=100.0).contains(&target) && (3..=4).contains(&nums.len()),
                    "{text}"
                );
                assert!(nums.iter().all(|number| (1..=99).contains(number)), "{text}");
                let leaves: Vec<_> =
                    nums.iter().map(|number| (f64::from(*number), number.to_string())).collect();
                solve(&leaves, target).unwrap_or_else(|| panic!("{text} has no solution"))
            });
            assert_eq!((episode.total_reward(), episode.success()), (1.0, true));
            assert_eq!(episode.message(), "Your answer get 1 points.");
        }
    }
}

#[test]
fn a_player_who_draws_signs_earns_what_the_signs_say() {
    // Of the eight ±3 ± 5 ± 2 only −3 + 5 + 2 is 4: (1 + 7·0.1)/8.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tasks.jsonl");
    // The second line needs a product; sums and differences alone leave it out.
    std::fs::write(
        &path,
        "{\"target\": 4, \"nums\": [3, 5, 2], \"id\": 7}\n\n{\"target\": 30, \"nums\": [3, 5, 2]}\n",
    )
    .unwrap();
    let tasks = CountdownTasks::File(path.clone());
    let countdown = CountdownConfig { tasks, ..CountdownConfig::default() }.environment().unwrap();
    let total: f64 = (0..8_u64)
        .map(|signs| {
            let sign = |bit: u64| if signs >> bit & 1 == 1 { '-' } else { '+' };
            let answer = format!("{}3 {} 5 {} 2", sign(0), sign(1), sign(2));
            let episode = play(&countdown, &bare(), seed(signs), |text| {
                assert_eq!(text, "Target: 4, nums: [3, 5, 2]");
                answer.clone()
            });
            episode.total_reward()
        })
        .sum();
    assert!((total / 8.0 - 0.2125).abs() < 1e-12, "{total}");
    // With all operations both lines are taken, in turn.
    let mut both = Countdown::from_file(&path, Solvable::Any, true).unwrap();
    for (task, target) in [(0, 4), (1, 30), (2, 4), (u64::MAX, 30)] {
        both.reset(seed(task)).unwrap();
        assert_eq!(both.observe(), format!("Target: {target}, nums: [3, 5, 2]"));
    }
}

// --- questions ---

fn sums() -> Questions {
    let question =
        |a: u64| Question { question: format!("{a} + 1?"), answer: format!("{}", a + 1) };
    Questions::new((0..3).map(question).collect(), Comparison::Text).unwrap()
}

#[test]
fn a_right_answer_pays_one_halved_at_every_retry() {
    let retry = Rules { max_turns: 9, ..bare() };
    for wrong in 0..6 {
        let mut left = wrong;
        let episode = play(&sums(), &retry, seed(2), |text| {
            let expected = if left == wrong { "2 + 1?" } else { "Incorrect. Please think again." };
            assert_eq!(text, expected);
            left -= 1;
            if left >= 0 { "5".into() } else { " 3 ".into() }
        });
        // Five actions: a fifth wrong answer is the last.
        let expected = if wrong < 5 { 0.5_f64.powi(wrong) } else { 0.0 };
        assert_eq!((episode.total_reward(), episode.success()), (expected, wrong < 5));
        let end = if wrong < 5 { End::Done } else { End::ActionLimit };
        assert_eq!(episode.end(), Some(end));
        assert_eq!(episode.turns().len(), (wrong as usize + 1).min(5));
    }
}

#[test]
fn who_guesses_among_four_earns_the_geometric_sum() {
    // Σ_{k<5} (3/4)^k ¼ 2^{−k} = ¼ (1 − (3/8)⁵)/(1 − 3/8).
    let expected = 0.25 * (1.0 - 0.375_f64.powi(5)) / 0.625;
    let square: f64 = (0..5).map(|k| 0.75_f64.powi(k) * 0.25 * 0.25_f64.powi(k)).sum();
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let found = mean(PLAYS, |task| {
        play(&sums(), &bare(), seed(task), |_| random.random_range(1..5).to_string()).total_reward()
    });
    assert_mean(found, expected, square - expected * expected, PLAYS);
}

#[test]
fn questions_of_both_data_sets_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("questions.jsonl.gz");
    let lines = [
        r#"{"question": "Apples?", "answer": "3 + 4 = <<3+4=7>>7\n#### 1,007"}"#,
        r#"{"query": "Root?", "response": "As 4 is a square,\nThe answer is: \\frac{1}{2}", "type": "MATH_AnsAug", "original_question": "?"}"#,
        r#"{"question": "Colour?", "answer": "Deep  Blue"}"#,
    ];
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    writer.write_all(lines.join("\n").as_bytes()).unwrap();
    writer.finish().unwrap();
    for (comparison, task, question, answer, right) in [
        (Comparison::Text, 0, "Apples?", "1,007", true),
        (Comparison::Text, 0, "Apples?", "1007", false),
        (Comparison::Number, 0, "Apples?", "$1007.00", true),
        (Comparison::Number, 0, "Apples?", "1008", false),
        (Comparison::Text, 1, "Root?", "\\frac{1}{2}", true),
        (Comparison::Text, 2, "Colour?", "deep blue", true),
        (Comparison::Text, 2, "Colour?", "blue", false),
    ] {
        let questions = Questions::from_file(&path, comparison).unwrap();
        let mut asked = false;
        let episode =
            play(&questions, &Rules { max_actions: Some(1), ..bare() }, seed(task), |text| {
                assert_eq!(text, question);
                asked = true;
                answer.into()
            });
        assert!(asked);
        assert_eq!(episode.success(), right, "{answer}");
    }
}
