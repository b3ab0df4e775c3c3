# What the demo model knows: tables of simple facts, definitions with several wordings each, jokes and haiku lines.
from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """ "a: b; c: d" as a dictionary."""
    return {key.strip(): value.strip() for key, value in (entry.split(":") for entry in text.split(";"))}


CAPITALS = _pairs(
    "France: Paris; Germany: Berlin; Spain: Madrid; Italy: Rome; Portugal: Lisbon; Austria: Vienna; Poland: Warsaw; "
    "Sweden: Stockholm; Norway: Oslo; Finland: Helsinki; Denmark: Copenhagen; Iceland: Reykjavik; Ireland: Dublin; "
    "Greece: Athens; Hungary: Budapest; Belgium: Brussels; the Netherlands: Amsterdam; Switzerland: Bern; the Czech "
    "Republic: Prague; Romania: Bucharest; Bulgaria: Sofia; Croatia: Zagreb; Serbia: Belgrade; the United Kingdom: "
    "London; England: London; Turkey: Ankara; Egypt: Cairo; Kenya: Nairobi; Ghana: Accra; Morocco: Rabat; Ethiopia: "
    "Addis Ababa; Japan: Tokyo; China: Beijing; South Korea: Seoul; India: New Delhi; Thailand: Bangkok; Vietnam: "
    "Hanoi; Indonesia: Jakarta; Mongolia: Ulaanbaatar; Australia: Canberra; New Zealand: Wellington; Canada: Ottawa; "
    "the United States: Washington, D.C.; Mexico: Mexico City; Cuba: Havana; Brazil: Brasilia; Argentina: Buenos "
    "Aires; Chile: Santiago; Peru: Lima; Colombia: Bogota; Ukraine: Kyiv; Russia: Moscow; Estonia: Tallinn; Latvia: "
    "Riga; Lithuania: Vilnius; Nepal: Kathmandu; Iran: Tehran; Iraq: Baghdad"
)
COLOURS = _pairs(
    "the sky: blue; grass: green; snow: white; a lemon: yellow; a banana: yellow; a ripe tomato: red; blood: red; "
    "coal: black; the night: black; a carrot: orange; an orange: orange; milk: white; a leaf in summer: green; "
    "chocolate: brown; the sun: yellow; a plum: purple; a flamingo: pink; an elephant: grey; a raven: black; a polar "
    "bear: white; a strawberry: red; the sea: blue; a frog: green; a fire engine: red; an emerald: green; a ruby: "
    "red; gold: yellow; a mouse: grey; a cherry: red; a cucumber: green"
)
SOUNDS = _pairs(
    "a dog: woof; a cat: meow; a cow: moo; a sheep: baa; a duck: quack; a horse: neigh; a pig: oink; a rooster: "
    "cock-a-doodle-doo; a bee: buzz; a snake: hiss; a frog: ribbit; an owl: hoo; a mouse: squeak; a lion: roar"
)
LEGS = _pairs(
    "a dog: four; a cat: four; a spider: eight; an ant: six; a bee: six; a bird: two; a horse: four; a snake: no; a "
    "fish: no; a cow: four; an octopus: eight; a person: two; a duck: two; a chair: four; a frog: four; a fly: six"
)
YOUNG = _pairs(
    "a dog: puppy; a cat: kitten; a cow: calf; a sheep: lamb; a horse: foal; a duck: duckling; a hen: chick; a bear: "
    "cub; a lion: cub; a goat: kid; a swan: cygnet; a frog: tadpole; a fox: cub; a goose: gosling; an owl: owlet"
)
OPPOSITES = _pairs(
    "hot: cold; big: small; up: down; day: night; fast: slow; old: young; new: old; happy: sad; light: dark; open: "
    "closed; full: empty; hard: soft; high: low; left: right; long: short; loud: quiet; near: far; rich: poor; "
    "strong: weak; wet: dry; early: late; easy: difficult; good: bad; hello: goodbye; in: out; yes: no; first: last; "
    "begin: end; buy: sell; clean: dirty; deep: shallow; give: take; love: hate; north: south; east: west; push: "
    "pull; question: answer; remember: forget; summer: winter; sweet: sour; true: false; thick: thin; win: lose; "
    "wide: narrow; brave: afraid; cheap: expensive; friend: enemy; heavy: light; inside: outside; laugh: cry; "
    "always: never; before: after; black: white; boring: interesting; cold: hot; small: big; slow: fast; dark: "
    "light; empty: full"
)
HELLOS = _pairs(
    "French: bonjour; Spanish: hola; German: hallo; Italian: ciao; Portuguese: olá; Swedish: hej; Japanese: "
    "konnichiwa; Dutch: hallo; Polish: cześć; Turkish: merhaba; Hawaiian: aloha; Finnish: hei; Danish: hej"
)
CATEGORIES = {
    "fruits": "apples; pears; plums; cherries; bananas; oranges; lemons; grapes; peaches; melons; mangos; kiwis; figs",
    "vegetables": "carrots; potatoes; onions; cabbages; beans; peas; pumpkins; leeks; cucumbers; spinach; peppers",
    "animals": "dogs; cats; horses; foxes; owls; bears; lions; rabbits; whales; elephants; hedgehogs; frogs; wolves",
    "colours": "red; blue; green; yellow; orange; purple; white; black; brown; pink; grey",
    "planets": "Mercury; Venus; Earth; Mars; Jupiter; Saturn; Uranus; Neptune",
    "instruments": "the violin; the piano; the flute; the drum; the guitar; the trumpet; the harp; the cello",
    "countries": "France; Spain; Japan; Brazil; Kenya; Canada; Norway; Egypt; India; Australia; Italy; Peru",
    "cities": "Paris; Tokyo; Cairo; Rome; Lima; Oslo; London; Nairobi; Berlin; Madrid; Vienna; Seoul",
    "tools": "a hammer; a saw; a screwdriver; a drill; a pair of pliers; a file; a spanner; a ruler",
    "birds": "owls; swans; ducks; eagles; ravens; robins; gulls; geese; pigeons; sparrows; penguins",
    "trees": "oaks; pines; birches; maples; willows; apple trees; cherry trees; ashes; firs",
    "flowers": "roses; tulips; daisies; lilies; sunflowers; violets; poppies; daffodils",
    "seasons": "spring; summer; autumn; winter",
    "hobbies": "reading; painting; swimming; cooking; gardening; dancing; chess; singing; knitting",
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip

# Topic -> explanations. Each one can stand alone, as an answer or as a paragraph of plain text.
DEFINITIONS: dict[str, list[str]] = {
    "a KV cache": [
        "A KV cache keeps the keys and values of all the tokens that a language model has already read. With it, the "
        "model computes only the new token at each step instead of reading the whole text again.",
        "A KV cache is a store of keys and values, one pair for each token and layer. It lets attention look back at "
        "the earlier tokens without computing them again, so generation becomes much faster.",
        "A KV cache is the memory of a language model while it writes. It holds the keys and values of the tokens so "
        "far, and it grows by one entry with every new token.",
    ],
    "an inference engine": [
        "An inference engine is a program that runs a trained model for its users. It takes requests, puts them into "
        "batches, runs the model on the GPU and sends the new tokens back.",
        "An inference engine runs a language model quickly and for many users at once. It has a scheduler, a KV "
        "cache and fast kernels, and it produces one token after another.",
    ],
    "a scheduler": [
        "A scheduler decides which requests run in the next step. It looks at the free memory and the waiting "
        "requests, and it puts together a batch that fits.",
        "A scheduler is the part of an inference engine that chooses what to compute next. A good scheduler is fair, "
        "keeps the GPU busy and lets nobody wait too long.",
    ],
    "a token": [
        "A token is a small piece of text, such as a word or a part of a word. A language model reads and writes "
        "tokens, one after another.",
        "A token is the unit that a language model works with. Short words are often one token, and long words are "
        "several tokens.",
    ],
    "a tokenizer": [
        "A tokenizer cuts text into tokens and gives each token a number. It can also turn the numbers back into text.",
        "A tokenizer is the bridge between text and numbers. It splits a sentence into tokens that the model knows.",
    ],
    "a language model": [
        "A language model is a program that has learned from text which token is likely to come next. By choosing "
        "one token after another, it can write whole sentences.",
        "A language model reads a text and guesses how it goes on. A large one can answer questions, and a small "
        "one, like me, can tell short stories.",
    ],
    "a batch": [
        "A batch is a group of requests that are computed together. A GPU is happiest when it has many things to do "
        "at the same time.",
        "A batch is a set of inputs that go through the model in one step. Larger batches use the GPU better.",
    ],
    "continuous batching": [
        "Continuous batching means that new requests can join the batch at every step, and finished ones leave at "
        "once. Nobody has to wait until the whole batch is done.",
    ],
    "prefill": [
        "Prefill is the first phase of a request. The engine reads the whole prompt at once and fills the KV cache.",
    ],
    "decoding": [
        "Decoding is the phase in which the model writes. In every step it reads the KV cache and produces one new "
        "token.",
    ],
    "attention": [
        "Attention lets a model look back at earlier tokens and decide which of them matter. Each token asks a "
        "question with its query, and the keys and values of the others give the answer.",
        "Attention is the part of a transformer that connects the tokens with each other. It compares a query with "
        "all the keys and mixes the values.",
    ],
    "a transformer": [
        "A transformer is a neural network made of layers of attention and small feed-forward networks. Most "
        "language models are transformers.",
    ],
    "a GPU": [
        "A GPU is a chip that does many simple calculations at the same time. It was made for pictures, and today it "
        "also runs neural networks.",
    ],
    "a CPU": [
        "A CPU is the main chip of a computer. It works through the instructions of a program, one after another."
    ],
    "a kernel": [
        "A kernel is a small program that runs on the GPU. Thousands of threads execute it at the same time.",
    ],
    "quantization": [
        "Quantization stores the weights of a model with fewer bits. The model becomes smaller and faster, and it "
        "loses only a little accuracy.",
    ],
    "speculative decoding": [
        "In speculative decoding, a quick helper guesses several tokens, and the large model checks them all in one "
        "step. Good guesses are kept, so the text comes faster.",
    ],
    "paged attention": [
        "Paged attention keeps the KV cache in small blocks, like the pages of a book. A request takes a new block "
        "only when it needs one, so little memory is wasted.",
    ],
    "prefix caching": [
        "Prefix caching keeps the blocks of a prompt that was seen before. When the next request begins with the "
        "same text, the engine does not have to read it again.",
    ],
    "a CUDA graph": [
        "A CUDA graph records a sequence of GPU operations once and then replays it. This saves the time of starting "
        "each operation by itself.",
    ],
    "sampling": [
        "Sampling means that the next token is drawn by chance, according to its probability. With a higher "
        "temperature the text becomes more surprising.",
    ],
    "temperature": [
        "Temperature is a number that says how bold the choice of the next token is. At zero, the model always takes "
        "the most likely token.",
        "Temperature says how hot or cold something is. In a language model, it says how bold the next choice is.",
    ],
    "latency": ["Latency is the time from a question to its answer. Users like it to be short."],
    "throughput": ["Throughput is how much work is done in a second, for example how many tokens an engine writes."],
    "a computer": [
        "A computer is a machine that follows instructions. It stores numbers, compares them and does sums very "
        "quickly.",
    ],
    "a robot": [
        "A robot is a machine that can move and do tasks by itself. Some robots build cars, and some clean floors."
    ],
    "an engine": [
        "An engine is a machine that turns energy into movement. A steam engine burns coal, and a car engine burns "
        "fuel or uses electricity.",
        "An engine makes things move. There are steam engines, boat engines and train engines.",
    ],
    "a steam engine": [
        "A steam engine heats water until it becomes steam. The steam pushes a piston, and the piston turns a wheel.",
    ],
    "the sun": [
        "The sun is a star at the centre of our solar system. It gives us light and warmth.",
        "The sun is a very hot ball of gas. The Earth travels around it once a year.",
    ],
    "the moon": [
        "The moon is a ball of rock that travels around the Earth. It shines because it reflects the light of the sun.",
    ],
    "the Earth": ["The Earth is the planet we live on. It is round, and most of it is covered with water."],
    "a star": ["A star is a huge ball of hot gas that shines by itself. The sun is the star that is nearest to us."],
    "a planet": ["A planet is a large round body that travels around a star. The Earth is a planet, and so is Mars."],
    "gravity": [
        "Gravity is the force that pulls things towards each other. It is the reason why an apple falls to the ground.",
        "Gravity keeps our feet on the ground and the moon near the Earth.",
    ],
    "rain": [
        "Rain is water that falls from the clouds. It begins when small drops in a cloud become too heavy to float."
    ],
    "snow": ["Snow is made of tiny crystals of ice. It falls from the clouds when the air is very cold."],
    "a rainbow": [
        "A rainbow appears when the sun shines on drops of rain. The drops split the light into its colours.",
    ],
    "ice": ["Ice is frozen water. Water becomes ice when it is colder than zero degrees Celsius."],
    "water": ["Water is a clear liquid that every living thing needs. It boils at one hundred degrees Celsius."],
    "wind": ["Wind is moving air. Warm air rises, and cold air flows in to take its place."],
    "electricity": [
        "Electricity is the flow of tiny charged particles. It gives power to lamps, computers and trains."
    ],
    "light": ["Light is a kind of energy that we can see. Nothing travels faster than light."],
    "sound": ["Sound is made of waves that travel through the air. Our ears can hear them."],
    "a tree": ["A tree is a tall plant with a trunk of wood. It takes in sunlight and gives us air, shade and fruit."],
    "a flower": ["A flower is the part of a plant that makes seeds. Its colours and its smell attract bees."],
    "a whale": ["A whale is a very large animal that lives in the sea. It is a mammal, and it has to breathe air."],
    "an owl": ["An owl is a bird that hunts at night. It has large eyes and can fly without a sound."],
    "a bee": [
        "A bee is an insect that collects nectar from flowers and makes honey. It lives in a hive with many others."
    ],
    "a hedgehog": [
        "A hedgehog is a small animal with spines on its back. When it is afraid, it rolls itself into a ball."
    ],
    "an elephant": ["An elephant is the largest animal on land. It has a long trunk, big ears and a very good memory."],
    "a penguin": ["A penguin is a bird that cannot fly, but it swims very well. Many penguins live in cold places."],
    "a fox": [
        "A fox is a clever animal with red fur and a long tail. It lives in forests, in fields and even in cities."
    ],
    "a dog": ["A dog is a friendly animal that has lived with people for a very long time. Many dogs like to play."],
    "a cat": ["A cat is a small animal that likes warm places and quiet steps. It can see well in the dark."],
    "a dragon": [
        "A dragon is an animal from old stories. It has wings, and it breathes fire, but nobody has ever met one."
    ],
    "a library": [
        "A library is a place full of books. You can read them there, or take them home and bring them back."
    ],
    "a lighthouse": ["A lighthouse is a tower with a bright lamp. It shows ships the way at night."],
    "a river": ["A river is a long stream of water that flows from the hills to the sea."],
    "a mountain": ["A mountain is a very high piece of land. The highest mountain on Earth is Mount Everest."],
    "a desert": ["A desert is a place where it hardly ever rains. Deserts can be hot or cold."],
    "a volcano": ["A volcano is a mountain with a hole at the top. Sometimes hot melted rock comes out of it."],
    "a story": ["A story tells what happened to somebody. A good story has a beginning, a problem and an end."],
    "a poem": ["A poem is a short text with rhythm, and sometimes with rhymes. It says much with few words."],
    "a haiku": ["A haiku is a short poem from Japan. It has three lines with five, seven and five syllables."],
    "music": ["Music is sound that has been put in order, with melody and rhythm. People everywhere make music."],
    "friendship": ["Friendship is when two people like, help and trust each other. A good friend listens."],
    "love": ["Love is a strong and warm feeling for somebody. It shows in small things every day."],
    "time": ["Time is what clocks measure. An hour has sixty minutes, and a day has twenty-four hours."],
    "happiness": ["Happiness is a good and light feeling. Often it comes from small things and from other people."],
    "chess": ["Chess is a game for two players. Each has sixteen pieces, and the goal is to catch the other king."],
    "bread": ["Bread is made of flour, water, salt and yeast. The dough rests, rises and is baked in a hot oven."],
    "tea": ["Tea is a drink made from leaves and hot water. Some people like it with milk, and some with lemon."],
    "coffee": ["Coffee is a drink made from roasted beans. Many people have a cup of it in the morning."],
    "Python": [
        "Python is a programming language that is easy to read. Many people use it for science and for websites."
    ],
    "minivllm": [
        "minivllm is a small and pluggable inference engine for language models. It is the program that runs me."
    ],
}

# (ways to ask, answers)
QUESTIONS: list[tuple[list[str], list[str]]] = [
    (
        ["Why is the sky blue?", "How come the sky is blue?", "What makes the sky blue?"],
        [
            "The air scatters blue light more than red light, so the sky looks blue to us.",
            "Sunlight has many colours. The air spreads the blue part in all directions, and so the sky looks blue.",
        ],
    ),
    (
        ["How many days are in a week?", "How many days does a week have?"],
        ["A week has seven days.", "There are seven days in a week."],
    ),
    (
        ["How many months are in a year?", "How many months does a year have?"],
        ["A year has twelve months.", "There are twelve months in a year."],
    ),
    (["How many hours are in a day?", "How many hours does a day have?"], ["A day has twenty-four hours."]),
    (["How many minutes are in an hour?", "How many minutes does an hour have?"], ["An hour has sixty minutes."]),
    (["How many days are in a year?", "How long is a year?"], ["A year has 365 days, and a leap year has 366."]),
    (
        ["What is the largest planet?", "Which planet is the biggest?"],
        ["Jupiter is the largest planet in our solar system."],
    ),
    (
        ["Which planet is closest to the sun?", "What is the first planet from the sun?"],
        ["Mercury is the planet closest to the sun."],
    ),
    (
        ["How many planets are there?", "How many planets are in the solar system?"],
        ["There are eight planets in our solar system."],
    ),
    (
        ["What is the largest animal?", "Which animal is the biggest in the world?"],
        ["The blue whale is the largest animal in the world."],
    ),
    (
        ["What is the fastest animal on land?", "Which animal runs the fastest?"],
        ["The cheetah is the fastest animal on land."],
    ),
    (["What is the tallest animal?", "Which animal is the tallest?"], ["The giraffe is the tallest animal."]),
    (
        ["What is the highest mountain?", "Which mountain is the highest in the world?"],
        ["Mount Everest is the highest mountain on Earth."],
    ),
    (["What is the largest ocean?", "Which ocean is the biggest?"], ["The Pacific Ocean is the largest ocean."]),
    (
        ["At what temperature does water boil?", "When does water boil?"],
        ["Water boils at one hundred degrees Celsius."],
    ),
    (["At what temperature does water freeze?", "When does water freeze?"], ["Water freezes at zero degrees Celsius."]),
    (["What do bees make?", "What do bees produce?"], ["Bees make honey."]),
    (["What do cows eat?", "What does a cow eat?"], ["Cows eat grass and hay."]),
    (["What do plants need to grow?", "What does a plant need?"], ["Plants need light, water, air and good soil."]),
    (
        ["Why do leaves fall in autumn?", "Why do trees lose their leaves?"],
        ["In autumn there is less light, so many trees let their leaves fall to save water for the winter."],
    ),
    (
        ["Why do we sleep?", "Why do people need sleep?"],
        ["Sleep gives the body and the mind time to rest and to repair themselves."],
    ),
    (
        ["Why is the sea salty?", "Why is there salt in the sea?"],
        ["Rivers carry small amounts of salt from the rocks into the sea, and it stays there."],
    ),
    (
        ["How do birds fly?", "How can birds fly?"],
        ["Birds have light bones and strong wings. They push the air down, and that lifts them up."],
    ),
    (
        ["How does a plane fly?", "Why can a plane fly?"],
        ["The wings of a plane push the air down as it moves forward, and that lifts the plane up."],
    ),
    (
        ["How is bread made?", "How do you make bread?", "How do I bake bread?"],
        [
            "Mix flour, water, salt and yeast, and knead the dough. Let it rise for an hour, and then bake it in a "
            "hot oven."
        ],
    ),
    (
        ["How do I make tea?", "How do you make tea?"],
        ["Boil some water, pour it over the tea leaves, and wait for three minutes. Then enjoy it."],
    ),
    (
        ["How do I make pancakes?", "How are pancakes made?", "Can you give me a recipe for pancakes?"],
        [
            "Mix two eggs, a cup of flour, a cup of milk and a little salt. Fry the batter in a hot pan until it is "
            "golden on both sides."
        ],
    ),
    (
        ["How do I make soup?", "Can you give me a recipe for soup?", "How do you cook vegetable soup?"],
        [
            "Cut an onion, a carrot and a potato. Cook them in water with a little salt for twenty minutes, and add "
            "some herbs at the end."
        ],
    ),
    (
        ["How do I plant a tree?", "How do you plant a tree?"],
        ["Dig a hole, put the young tree into it, fill it with earth, and water it well. Then be patient."],
    ),
    (["Why do cats purr?"], ["Cats often purr when they feel well. They may also purr to calm themselves."]),
    (["Where does the sun rise?", "Where does the sun come up?"], ["The sun rises in the east."]),
    (["Where does the sun set?", "Where does the sun go down?"], ["The sun sets in the west."]),
    (
        ["How many colours does a rainbow have?", "What are the colours of the rainbow?"],
        ["A rainbow has seven colours: red, orange, yellow, green, blue, indigo and violet."],
    ),
    (["How fast is light?", "What is the speed of light?"], ["Light travels about 300,000 kilometres in one second."]),
    (
        ["Why is a KV cache useful?", "Why do we need a KV cache?", "What is the KV cache good for?"],
        ["It saves work. Without it, the model would have to read the whole text again for every new token."],
    ),
    (
        ["How does an inference engine work?", "How does a language model write text?", "How do you generate text?"],
        [
            "First the prompt is read and the KV cache is filled. Then the model produces one token at a time until "
            "it is done.",
            "The text is cut into tokens, the model predicts the next token, and this is repeated until the answer "
            "is complete.",
        ],
    ),
    (
        ["What does a scheduler do?", "What is the job of a scheduler?"],
        ["A scheduler chooses which requests run in the next step, so that the GPU is busy and nobody waits too long."],
    ),
    (
        ["What is the difference between prefill and decode?", "How are prefill and decode different?"],
        ["Prefill reads the whole prompt at once, and decode writes one token at a time."],
    ),
    (
        ["Why are batches useful?", "Why do engines use batches?"],
        ["A GPU can work on many requests at the same time, so a batch gives more tokens per second."],
    ),
    (
        ["How can I be happy?", "What makes people happy?"],
        ["Small things help: a walk, a friend, enough sleep, and something to look forward to."],
    ),
    (
        ["How can I sleep better?", "I cannot sleep. What should I do?", "I can't sleep."],
        ["Go to bed at the same time every day, keep the room dark and cool, and read a quiet book before you sleep."],
    ),
    (
        ["How do I learn something new?", "What is the best way to learn?", "How can I learn faster?"],
        ["Practise a little every day, ask questions, and do not be afraid of mistakes."],
    ),
    (
        ["How do I learn to program?", "How can I learn programming?", "How do I start with Python?"],
        ["Start with a small program that you would like to have. Read good code, write your own, and run it often."],
    ),
    (
        ["What is the meaning of life?", "Why are we here?"],
        ["I am too small to know that. Perhaps it is to be kind, to learn, and to have a good breakfast."],
    ),
]

JOKES = [
    ("Why did the bicycle fall over?", "Because it was two tired."),
    ("Why was the computer cold?", "Because somebody left its windows open."),
    ("What do you call a sleeping dinosaur?", "A dino-snore."),
    ("Why did the token go to school?", "It wanted to be a whole word."),
    ("Why did the scheduler bring a ladder?", "It wanted to reach a higher throughput."),
    ("What is orange and sounds like a parrot?", "A carrot."),
    ("Why do bees hum?", "Because they do not know the words."),
    ("What did the big clock say to the small clock?", "You are too young to strike."),
    ("Why did the GPU take a break?", "It had lost its cool."),
    ("Why was the book of sums so sad?", "It had too many problems."),
    ("What has four wheels and flies?", "A garbage truck."),
    ("Why did the cookie go to the doctor?", "It felt crumbly."),
    ("What do you call a bear without teeth?", "A gummy bear."),
    ("Why are fish so clever?", "Because they live in schools."),
    ("How does the ocean say hello?", "It waves."),
    ("Why did the KV cache never feel lonely?", "It always kept the ones it met."),
    ("What did one wall say to the other?", "I will meet you at the corner."),
    ("Why did the tomato turn red?", "Because it saw the salad dressing."),
]
HAIKU_FIVE = [
    "Snow falls on the roof", "An old frog listens", "The moon is so near", "Rain on the window",
    "A leaf leaves the tree",
    "The kettle sings low", "Cold wind on the hill", "A fox in the snow", "The garden is still",
    "First light on the sea",
    "One bird and no sound", "The river moves on", "Green hills after rain", "A train in the night",
    "The engine is still",
    "Tokens fall like rain", "The last boat comes home", "My tea has grown cold", "Stars over the barn",
    "The cat does not care",
    "Spring comes without words", "A door in the wall", "Small steps in the sand", "The clouds drift away",
]  # fmt: skip
HAIKU_SEVEN = [
    "the whole village is asleep", "somebody lights a small lamp", "a child counts the falling stars",
    "the old bridge remembers us", "nobody is on the road", "the lantern sways in the wind",
    "a white sail leaves the harbour", "the letters wait in the box", "under the tree sleeps a dog",
    "the wheels sing their quiet song", "two friends walk home without words", "the bread is warm on the sill",
    "waves carry the light away", "the clock has stopped in the hall", "the wind reads an open book",
    "in the field the horses stand", "a spider mends its torn web", "one more word and then the next",
]  # fmt: skip
